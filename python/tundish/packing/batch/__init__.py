"""What goes with a batch of packs: attention masks, loss weights, and the split over context-parallel ranks."""
