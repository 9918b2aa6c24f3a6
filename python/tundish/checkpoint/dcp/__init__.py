"""DCP checkpoints: saved while training goes on, in the format of `torch.distributed.checkpoint`."""
