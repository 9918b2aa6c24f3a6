"""Scatter: one rank has the data, every rank gets its own batch.

Its modules, and torch, are imported when one of its names is first used.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.scatter.collective import scatter_batch, stats
    from tundish.scatter.dispatch_loader import DispatchLoader
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.scatter.collective": ("scatter_batch", "stats"),
            "tundish.scatter.dispatch_loader": ("DispatchLoader",),
        },
    )

__all__ = ["DispatchLoader", "scatter_batch", "stats"]
