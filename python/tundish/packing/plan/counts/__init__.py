"""Counts the tokens and samples of a plan."""
