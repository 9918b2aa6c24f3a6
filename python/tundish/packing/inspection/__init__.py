"""Shows plans, mixes and packs: counts, pictures, tables for notebooks, previews."""
