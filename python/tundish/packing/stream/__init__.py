"""Packs of samples that come one after the other."""
