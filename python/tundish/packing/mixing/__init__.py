"""Mixes: an order over the packs of several plans, by weight."""
