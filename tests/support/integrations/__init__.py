"""Helpers of the tests of framework adapters."""
