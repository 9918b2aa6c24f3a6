"""Tensors that one process makes and others consume: handles travel, bytes go directly from owner to consumer.

    >>> import torch
    >>> import tundish as td
    >>> server = td.rtensor.serve()                     # once in every process that stores or fetches
    >>> batch = td.rtensor.remotize({"input_ids": torch.arange(6).view(2, 3), "task": "caption"})
    >>> batch["input_ids"].shape, batch["task"]
    (torch.Size([2, 3]), 'caption')
    >>> sent = td.rtensor.dumps(batch)                  # to wherever the batch is consumed
    >>> with td.rtensor.step(claim=batch):
    ...     td.rtensor.localize(td.rtensor.loads(sent))["input_ids"].sum()
    tensor(15)
    >>> td.rtensor.storage_stats()["num_tensors"], td.rtensor.fetch_buffer_stats()["num_entries"]
    (0, 0)
    >>> server.close()

Invariants:
    What is fetched belongs to a step; every process drops it when the step ends, and refuses what arrives later.
    Memory is bounded in bytes on both sides. At the limit calls wait, and then raise; nothing in use is evicted.
    A fetched tensor is the caller's to write to: no other reader sees the change.
    Nothing from the network is unpickled, imported or called.

The modules are imported when one of their names is used.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish._native import RTensor
    from tundish.rtensor.backends import Backend, HttpBackend, LocalBackend, RayBackend
    from tundish.rtensor.controller import Controller, Drained
    from tundish.rtensor.handles import (
        TensorShardInfo,
        collect_shards,
        dumps,
        flatten_shard_ids,
        loads,
    )
    from tundish.rtensor.monitoring import process_stats
    from tundish.rtensor.server import Server, trust
    from tundish.rtensor.steps import Step
    from tundish.rtensor.tensor_store import (
        TensorStore,
        clear_fetch_buffer,
        clear_node,
        drain,
        fetch,
        fetch_buffer_stats,
        keep,
        localize,
        remotize,
        remove,
        serve,
        set_backend,
        stats,
        step,
        storage_stats,
        store,
    )
    from tundish.rtensor.workers import Worker
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.rtensor.backends": (
                "Backend",
                "HttpBackend",
                "LocalBackend",
                "RayBackend",
            ),
            "tundish.rtensor.controller": (
                "Controller",
                "Drained",
            ),
            "tundish.rtensor.handles": (
                "RTensor",
                "TensorShardInfo",
                "collect_shards",
                "dumps",
                "flatten_shard_ids",
                "loads",
            ),
            "tundish.rtensor.monitoring": ("process_stats",),
            "tundish.rtensor.server": (
                "Server",
                "trust",
            ),
            "tundish.rtensor.steps": ("Step",),
            "tundish.rtensor.tensor_store": (
                "TensorStore",
                "clear_fetch_buffer",
                "clear_node",
                "drain",
                "fetch",
                "fetch_buffer_stats",
                "keep",
                "localize",
                "remotize",
                "remove",
                "serve",
                "set_backend",
                "stats",
                "step",
                "storage_stats",
                "store",
            ),
            "tundish.rtensor.workers": ("Worker",),
        },
    )

__all__ = [
    "Backend",
    "Controller",
    "Drained",
    "HttpBackend",
    "LocalBackend",
    "RTensor",
    "RayBackend",
    "Server",
    "Step",
    "TensorShardInfo",
    "TensorStore",
    "Worker",
    "clear_fetch_buffer",
    "clear_node",
    "collect_shards",
    "drain",
    "dumps",
    "fetch",
    "fetch_buffer_stats",
    "flatten_shard_ids",
    "keep",
    "loads",
    "localize",
    "process_stats",
    "remotize",
    "remove",
    "serve",
    "set_backend",
    "stats",
    "step",
    "storage_stats",
    "store",
    "trust",
]
