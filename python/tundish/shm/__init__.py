"""Shared memory: one copy of an array for all processes of a node, and a pool of processes that work on it.

Names are imported on first use; torch is never imported here.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.shm.memory import NamedSegment, SweepReport, set_cache_limit, stats, sweep
    from tundish.shm.node_sharing import node_shared
    from tundish.shm.shared_array import Handle, SharedArray
    from tundish.shm.shared_pool import SharedPool
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.shm.shared_array": ("Handle", "SharedArray"),
            "tundish.shm.memory": ("NamedSegment", "SweepReport", "set_cache_limit", "stats", "sweep"),
            "tundish.shm.node_sharing": ("node_shared",),
            "tundish.shm.shared_pool": ("SharedPool",),
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
