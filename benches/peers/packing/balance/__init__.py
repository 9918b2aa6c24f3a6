"""Balanced parts, beside verl."""
