"""Hugging Face exports: what is saved and where it lies (`plan`), the save (`export`), and its exchange (`gather`)."""
