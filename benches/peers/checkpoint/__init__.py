"""Saving: tundish beside what people save checkpoints with today."""
