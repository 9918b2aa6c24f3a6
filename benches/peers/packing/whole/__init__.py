"""Packing whole samples, beside other packers."""
