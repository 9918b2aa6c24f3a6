"""Helper modules of the tests of checkpoints."""
