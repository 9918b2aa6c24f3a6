"""Reads token counts and samples from the files and datasets that users have: one module for each kind of source."""
