"""Batches of packs: which packs each rank takes at each step, how they become the arguments of a model, and the loader.

The public names are those of `tundish.packing`.
"""
