"""Copies tensors into host memory, within a byte limit."""
