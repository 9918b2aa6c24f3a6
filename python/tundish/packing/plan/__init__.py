"""`PackPlan`: the packs, their folder, statistics and plots."""
