"""Ranks that reach each other over NCCL, on machines with fewer devices than ranks too."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed


def nccl_group(rank: int) -> Any:
    """A group of all ranks over NCCL, the device of this one being current from here on.

    NCCL refuses two ranks on one device of a host: where devices are too few, each rank claims a host of its own.
    """
    count = torch.cuda.device_count()
    if count < distributed.get_world_size():
        os.environ["NCCL_HOSTID"] = f"host of rank {rank}"
    torch.cuda.set_device(rank % count)
    return distributed.new_group(backend="nccl")
