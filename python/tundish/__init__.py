"""tundish: the plumbing around an LLM training loop.

Importing this imports no part of it: each comes when one of its names is asked for, and torch with those names that
need it.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish import checkpoint, distributed, errors, packing, rtensor, scatter, shm, tree
    from tundish import hf as hf
    from tundish.checkpoint import Checkpointer
    from tundish.errors import TundishError
    from tundish.packing import (
        Pack,
        PackedBatchSampler,
        PackedCollator,
        PackedDataset,
        PackPlan,
        Piece,
        pack,
        pack_datasets,
    )
    from tundish.scatter import DispatchLoader, scatter_batch
    from tundish.version import __version__ as __version__
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.checkpoint": ("Checkpointer",),
            "tundish.distributed": (),
            "tundish.errors": ("TundishError",),
            "tundish.hf": (),
            "tundish.packing": (
                "Pack",
                "PackPlan",
                "PackedBatchSampler",
                "PackedCollator",
                "PackedDataset",
                "Piece",
                "pack",
                "pack_datasets",
            ),
            "tundish.rtensor": (),
            "tundish.scatter": ("DispatchLoader", "scatter_batch"),
            "tundish.shm": (),
            "tundish.tree": (),
            "tundish.version": ("__version__",),
        },
        extras={"tundish.hf": "transformers"},
    )

# Without `hf`, which needs an extra: `from tundish import *` is for everybody.
__all__ = [
    "Checkpointer",
    "DispatchLoader",
    "Pack",
    "PackPlan",
    "PackedBatchSampler",
    "PackedCollator",
    "PackedDataset",
    "Piece",
    "TundishError",
    "checkpoint",
    "distributed",
    "errors",
    "pack",
    "pack_datasets",
    "packing",
    "rtensor",
    "scatter",
    "scatter_batch",
    "shm",
    "tree",
]
