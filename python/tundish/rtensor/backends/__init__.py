"""Backends: where tensors are stored, and how they are fetched."""
