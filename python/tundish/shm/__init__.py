"""Shared memory: one copy of an array for all processes of a node, and a pool of processes that work on it.

Names are imported on first use; torch is never imported here.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.shm.handle import Handle
    from tundish.shm.memory_stats import set_cache_limit, stats
    from tundish.shm.named_segments import NamedSegment, SweepReport, sweep
    from tundish.shm.node_sharing import node_shared
    from tundish.shm.pool import SharedPool
    from tundish.shm.shared_array import SharedArray
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.shm.shared_array": ("SharedArray",),
            "tundish.shm.handle": ("Handle",),
            "tundish.shm.memory_stats": ("set_cache_limit", "stats"),
            "tundish.shm.named_segments": ("NamedSegment", "SweepReport", "sweep"),
            "tundish.shm.node_sharing": ("node_shared",),
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
