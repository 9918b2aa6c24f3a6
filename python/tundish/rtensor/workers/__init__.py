"""The processes that a controller drains, and the requests to them."""
