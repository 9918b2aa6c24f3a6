"""Builds plans: in this process, in a cache, or once a node for all ranks."""
