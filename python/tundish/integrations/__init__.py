"""Adapters for training frameworks: one folder for each family of frameworks.

An adapter imports only the public names of tundish's parts, and its framework, which is an optional extra.
"""
