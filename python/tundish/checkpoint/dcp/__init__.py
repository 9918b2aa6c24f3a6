"""DCP checkpoints: saved while training goes on, in the format of `torch.distributed.checkpoint`.

`saving` plans, stages and writes a save; `loading` opens, verifies and loads a checkpoint.
"""
