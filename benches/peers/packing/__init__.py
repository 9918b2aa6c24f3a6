"""Packing: tundish beside the forms and the helper that people pack with today."""
