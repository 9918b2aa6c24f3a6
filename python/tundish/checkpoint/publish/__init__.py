"""Publishes checkpoints under a root, lists them and removes old ones."""
