"""Attention masks and loss weights of batches, and their split over context-parallel ranks."""
