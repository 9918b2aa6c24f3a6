"""Hugging Face exports: `plan.plan_hf` is what a checkpointer has of them.

Layers, each knowing only those before it: `conversion`, `pretrained` and `adapters` (what becomes of the tensors),
`shards` and `images` (where they lie), `gather` (where they come from), `sidecars` (everything else), `export` and
`through` (onto the disk), `drawing` (all that is decided before a value is touched), `plan`.
"""
