"""The side-by-side bench of remote tensors."""
