"""Scatter: one rank has the data, every rank gets its own batch.

`collective` has the call for one step, `dispatch_loader` the loader. A step of a loader goes through the modules in
this order:

1. `batch_reader` draws from the user's loader as many batches as the step needs, on the source.
2. `iteration` passes them to `steps`, which sends every rank its own; on the other ranks it receives them from there.
   `batch_bytes` and `transport` carry them; `rendezvous` has connected the ranks, which `participants` names.
3. `prefetch` does 1 and 2 on a thread and queues the steps, or does them when the caller asks.
4. `dispatch_loader` makes the batch of a step that its iterator takes, and counts it.

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
