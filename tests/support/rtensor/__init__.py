"""Helpers of the tests of rtensor."""
