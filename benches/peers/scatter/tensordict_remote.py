"""tensordict's way to send a rank what it does not know the structure of: one rank after the other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tensordict import TensorDict

__all__ = ["remote"]


def remote(batches: list[Any] | None) -> Any:
    if batches is None:
        return TensorDict.from_remote_init(src=0)
    for rank in range(1, dist.get_world_size()):
        TensorDict(batches[rank]).init_remote(dst=rank)
    return batches[0]
