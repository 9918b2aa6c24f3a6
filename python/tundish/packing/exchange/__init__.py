"""Plans in the formats of other trainers: one module for each format."""
