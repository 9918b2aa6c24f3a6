"""Reference plans, datasets and samplers for the tests of packing."""
