"""The packs of a plan as training items and batches."""
