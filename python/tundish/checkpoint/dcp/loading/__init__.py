"""Loading DCP checkpoints: opening, verification by all ranks, and reading into a state dict."""
