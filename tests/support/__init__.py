"""Helper modules of the tests: one sub-package for each part."""
