"""Scatter beside what people use today."""
