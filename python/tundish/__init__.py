"""tundish: packing, shared memory, scatter, checkpoints and remote tensors for PyTorch training loops.

`import tundish` imports no part and no torch. Each part is imported when one of its names is first used.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish import checkpoint, distributed, errors, packing, rtensor, scatter, shm, tree
    from tundish.checkpoint import Checkpointer
    from tundish.errors import TundishError
    from tundish.integrations import hf  # noqa: F401 (see `__all__` below)
    from tundish.packing import (
        Pack,
        PackedBatchSampler,
        PackedCollator,
        PackedDataset,
        PackedStream,
        PackMix,
        PackPlan,
        Piece,
        loader,
        mix,
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
            "tundish.packing": (
                "Pack",
                "PackMix",
                "PackPlan",
                "PackedBatchSampler",
                "PackedCollator",
                "PackedDataset",
                "PackedStream",
                "Piece",
                "loader",
                "mix",
                "pack",
                "pack_datasets",
            ),
            "tundish.rtensor": (),
            "tundish.scatter": ("DispatchLoader", "scatter_batch"),
            "tundish.shm": (),
            "tundish.tree": (),
            "tundish.version": ("__version__",),
        },
        modules={"hf": "tundish.integrations.hf"},
        requires={"hf": "transformers"},
    )

# `hf` needs an optional package, and `from tundish import *` must work without it.
__all__ = [
    "Checkpointer",
    "DispatchLoader",
    "Pack",
    "PackMix",
    "PackPlan",
    "PackedBatchSampler",
    "PackedCollator",
    "PackedDataset",
    "PackedStream",
    "Piece",
    "TundishError",
    "checkpoint",
    "distributed",
    "errors",
    "loader",
    "mix",
    "pack",
    "pack_datasets",
    "packing",
    "rtensor",
    "scatter",
    "scatter_batch",
    "shm",
    "tree",
]
