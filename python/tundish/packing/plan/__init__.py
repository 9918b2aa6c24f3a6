"""A plan, and what can be done with it."""
