"""Pools of processes that work on one array, and arrays that the ranks of a node share."""
