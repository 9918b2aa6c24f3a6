"""Adapters for training frameworks: one file for each framework.

An adapter imports only the public names of tundish's parts, and its framework, which is an optional extra.
"""
