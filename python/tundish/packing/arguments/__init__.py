"""Checks the arguments that the packing functions share."""
