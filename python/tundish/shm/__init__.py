"""Shared memory: one copy of an array for all processes of a node, and a pool of processes that work on it.

Importing this imports no module of it: each comes when one of its names is asked for, and torch never.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.shm.array import SharedArray
    from tundish.shm.handle import Handle
    from tundish.shm.memory import set_cache_limit, stats
    from tundish.shm.named import NamedSegment, SweepReport, sweep
    from tundish.shm.node import node_shared
    from tundish.shm.pool import SharedPool
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.shm.array": ("SharedArray",),
            "tundish.shm.handle": ("Handle",),
            "tundish.shm.memory": ("set_cache_limit", "stats"),
            "tundish.shm.named": ("NamedSegment", "SweepReport", "sweep"),
            "tundish.shm.node": ("node_shared",),
            "tundish.shm.pool": ("SharedPool",),
        },
    )

__all__ = [
    "Handle",
    "NamedSegment",
    "SharedArray",
    "SharedPool",
    "SweepReport",
    "node_shared",
    "set_cache_limit",
    "stats",
    "sweep",
]
