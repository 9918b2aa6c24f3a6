"""Scatter: one rank has the data, every rank gets its own batch.

Importing this imports no module of it: each comes when one of its names is asked for, and torch with it.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.scatter.call import scatter_batch, stats
    from tundish.scatter.loader import DispatchLoader
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.scatter.call": ("scatter_batch", "stats"),
            "tundish.scatter.loader": ("DispatchLoader",),
        },
    )

__all__ = ["DispatchLoader", "scatter_batch", "stats"]
