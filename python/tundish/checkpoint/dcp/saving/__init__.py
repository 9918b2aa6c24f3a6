"""Saving DCP checkpoints, from a state dict to durable files."""
