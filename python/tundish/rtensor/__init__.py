"""Tensors that one process makes and others consume: handles travel, bytes go straight from owner to consumer.

    >>> import torch
    >>> import tundish as td
    >>> server = td.rtensor.serve()                     # once a process that stores or fetches
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

`handle` is what travels, `storing` and `localizing` are the two ends of the way, `backends` say how the bytes go
it, `serving` is a process's server. `controller` and `steps` drain. What always holds:

1. What is fetched belongs to a step, and every process that has it drops it when the step ends; what comes later is
   refused.
2. Memory is bounded in bytes on both sides; at the limit calls wait, and then raise. Nothing that lives is evicted.
3. A tensor that was handed out is its holder's to write to, and nobody else sees that.
4. Nothing from the network is unpickled, imported or called.

Importing this imports no module of it: each comes when one of its names is asked for.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.rtensor.answers import Drained
    from tundish.rtensor.backends import Backend, HttpBackend, LocalBackend, set_backend
    from tundish.rtensor.controller import Controller
    from tundish.rtensor.handle import (
        RTensor,
        TensorShardInfo,
        collect_shards,
        dumps,
        flatten_shard_ids,
        loads,
    )
    from tundish.rtensor.lines import Worker
    from tundish.rtensor.localizing import clear_fetch_buffer, fetch_buffer_stats, localize
    from tundish.rtensor.on_ray import RayBackend
    from tundish.rtensor.serving import Server, serve, trust
    from tundish.rtensor.steps import Step, drain, keep, step
    from tundish.rtensor.storing import clear_node, fetch, remotize, remove, storage_stats, store
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.rtensor.answers": ("Drained",),
            "tundish.rtensor.backends": ("Backend", "HttpBackend", "LocalBackend", "set_backend"),
            "tundish.rtensor.controller": ("Controller",),
            "tundish.rtensor.handle": (
                "RTensor",
                "TensorShardInfo",
                "collect_shards",
                "dumps",
                "flatten_shard_ids",
                "loads",
            ),
            "tundish.rtensor.lines": ("Worker",),
            "tundish.rtensor.localizing": ("clear_fetch_buffer", "fetch_buffer_stats", "localize"),
            "tundish.rtensor.on_ray": ("RayBackend",),
            "tundish.rtensor.serving": ("Server", "serve", "trust"),
            "tundish.rtensor.steps": ("Step", "drain", "keep", "step"),
            "tundish.rtensor.storing": (
                "clear_node",
                "fetch",
                "remotize",
                "remove",
                "storage_stats",
                "store",
            ),
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
    "remotize",
    "remove",
    "serve",
    "set_backend",
    "step",
    "storage_stats",
    "store",
    "trust",
]
