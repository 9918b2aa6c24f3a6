"""The contestants of scatter.

Each is a function that takes the list of all batches on rank 0, and None on the other ranks. It returns this rank's
batch, which the caller may write to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tundish as td

Scatter = Callable[[list[Any] | None], Any]


def ours() -> Scatter:
    """A tundish scatter from rank 0."""
    return td.scatter_batch


def take_apart(batch: Any, tensors: list[torch.Tensor]) -> Any:
    """The batch with dtype and shape in place of each tensor. Appends the tensors to `tensors`."""
    if isinstance(batch, torch.Tensor):
        tensors.append(batch)
        return ("tensor", batch.dtype, batch.shape)
    if isinstance(batch, dict):
        return ("dict", {key: take_apart(value, tensors) for key, value in batch.items()})
    return (type(batch), [take_apart(value, tensors) for value in batch])


def rebuild(schema: Any, tensors: list[torch.Tensor]) -> Any:
    """The batch that `take_apart` took apart, with new tensors. Appends them to `tensors`."""
    kind, *rest = schema
    if kind == "tensor":
        dtype, shape = rest
        tensors.append(torch.empty(shape, dtype=dtype))
        return tensors[-1]
    if kind == "dict":
        return {key: rebuild(value, tensors) for key, value in rest[0].items()}
    parts = [rebuild(value, tensors) for value in rest[0]]
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def isend(batches: list[Any] | None) -> Any:
    """Schemas by scatter_object_list, one isend for each tensor, new memory on the receiver."""
    received: list[Any] = [None]
    if batches is None:
        dist.scatter_object_list(received, None, src=0)
        tensors: list[torch.Tensor] = []
        batch = rebuild(received[0], tensors)
        for work in [dist.irecv(tensor, src=0) for tensor in tensors]:
            work.wait()
        return batch
    tensors_by_rank: list[list[torch.Tensor]] = [[] for _ in batches]
    schemas = [take_apart(batch, tensors) for batch, tensors in zip(batches, tensors_by_rank, strict=True)]
    dist.scatter_object_list(received, schemas, src=0)
    sends = [
        dist.isend(tensor, dst=rank) for rank in range(1, len(batches)) for tensor in tensors_by_rank[rank]
    ]
    for send in sends:
        send.wait()
    return batches[0]


def objects(batches: list[Any] | None) -> Any:
    """torch's scatter_object_list, which pickles whole batches."""
    received: list[Any] = [None]
    dist.scatter_object_list(received, batches, src=0)
    return received[0]


def dispatcher(split_batches: bool) -> Scatter:
    """Accelerate's DataLoaderDispatcher."""
    # Not every environment has it.
    from scatter.accelerate_dispatcher import Dispatcher

    return Dispatcher(split_batches)


def init_remote() -> Scatter:
    """tensordict's init_remote, to one rank after the other."""
    # Not every environment has it.
    from tensordict import TensorDict

    def scatter(batches: list[Any] | None) -> Any:
        if batches is None:
            return TensorDict.from_remote_init(src=0)
        for rank in range(1, dist.get_world_size()):
            TensorDict(batches[rank]).init_remote(dst=rank)
        return batches[0]

    return scatter


# By name, functions that all ranks call in the same order.
CONTESTANTS: dict[str, Callable[[], Scatter]] = {
    "ours": ours,
    "isend": lambda: isend,
    "objects": lambda: objects,
    "accelerate": lambda: dispatcher(split_batches=False),
    "accelerate split": lambda: dispatcher(split_batches=True),
    "tensordict": init_remote,
}
