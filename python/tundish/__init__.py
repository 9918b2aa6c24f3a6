"""tundish: the plumbing around an LLM training loop."""
