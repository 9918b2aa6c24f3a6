"""Helpers of the tests of shared memory."""
