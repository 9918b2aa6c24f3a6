"""Packing: from token lengths to a plan of fixed-length sequences, and from the plan to batches.

Importing this imports no module of it: each comes when one of its names is asked for, and torch with those names that
need it.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.packing.build import pack, pack_datasets
    from tundish.packing.collate import PackedCollator
    from tundish.packing.dataset import PackedDataset
    from tundish.packing.order import shuffled_indices
    from tundish.packing.plan import Pack, PackBatch, PackPlan, Piece
    from tundish.packing.sampler import PackedBatchSampler
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.packing.build": ("pack", "pack_datasets"),
            "tundish.packing.collate": ("PackedCollator",),
            "tundish.packing.dataset": ("PackedDataset",),
            "tundish.packing.order": ("shuffled_indices",),
            "tundish.packing.plan": ("Pack", "PackBatch", "PackPlan", "Piece"),
            "tundish.packing.sampler": ("PackedBatchSampler",),
        },
    )

__all__ = [
    "Pack",
    "PackBatch",
    "PackPlan",
    "PackedBatchSampler",
    "PackedCollator",
    "PackedDataset",
    "Piece",
    "pack",
    "pack_datasets",
    "shuffled_indices",
]
