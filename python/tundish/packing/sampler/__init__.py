"""The packs that each rank trains on, step by step."""
