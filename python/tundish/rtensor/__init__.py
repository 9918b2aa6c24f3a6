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
    from tundish.rtensor.backends.backend import Backend
    from tundish.rtensor.backends.current_backend import set_backend
    from tundish.rtensor.backends.http import HttpBackend
    from tundish.rtensor.backends.local import LocalBackend
    from tundish.rtensor.backends.ray import RayBackend
    from tundish.rtensor.controller.controller import Controller
    from tundish.rtensor.controller.drained import Drained
    from tundish.rtensor.handles import (
        RTensor,
        TensorShardInfo,
        collect_shards,
        dumps,
        flatten_shard_ids,
        loads,
    )
    from tundish.rtensor.server import Server, serve, trust
    from tundish.rtensor.steps.group_drain import drain
    from tundish.rtensor.steps.step import Step, keep, step
    from tundish.rtensor.storage import clear_node, fetch, remove, storage_stats, store
    from tundish.rtensor.transfer.localize import clear_fetch_buffer, fetch_buffer_stats, localize
    from tundish.rtensor.transfer.remotize import remotize
    from tundish.rtensor.workers.remote_stats import process_stats
    from tundish.rtensor.workers.worker import Worker
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.rtensor.backends.backend": ("Backend",),
            "tundish.rtensor.backends.current_backend": ("set_backend",),
            "tundish.rtensor.backends.http": ("HttpBackend",),
            "tundish.rtensor.backends.local": ("LocalBackend",),
            "tundish.rtensor.backends.ray": ("RayBackend",),
            "tundish.rtensor.controller.controller": ("Controller",),
            "tundish.rtensor.controller.drained": ("Drained",),
            "tundish.rtensor.handles": (
                "RTensor",
                "TensorShardInfo",
                "collect_shards",
                "dumps",
                "flatten_shard_ids",
                "loads",
            ),
            "tundish.rtensor.server": ("Server", "serve", "trust"),
            "tundish.rtensor.steps.group_drain": ("drain",),
            "tundish.rtensor.steps.step": ("Step", "keep", "step"),
            "tundish.rtensor.storage": ("clear_node", "fetch", "remove", "storage_stats", "store"),
            "tundish.rtensor.transfer.localize": ("clear_fetch_buffer", "fetch_buffer_stats", "localize"),
            "tundish.rtensor.transfer.remotize": ("remotize",),
            "tundish.rtensor.workers.remote_stats": ("process_stats",),
            "tundish.rtensor.workers.worker": ("Worker",),
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
    "step",
    "storage_stats",
    "store",
    "trust",
]
