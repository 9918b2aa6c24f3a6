"""Gathers sharded tensors on the rank that writes them."""
