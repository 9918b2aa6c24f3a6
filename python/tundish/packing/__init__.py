"""Packing: from token lengths to a plan of fixed-length sequences, and from the plan to batches.

Importing this, and making plans, does not import torch; what needs torch is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tundish.packing.build import pack, pack_datasets
from tundish.packing.order import shuffled_indices
from tundish.packing.plan import Pack, PackBatch, PackPlan, Piece
from tundish.packing.sampler import PackedBatchSampler

if TYPE_CHECKING:
    from tundish.packing.collate import PackedCollator
    from tundish.packing.dataset import PackedDataset

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

_NEEDS_TORCH = {"PackedCollator": "collate", "PackedDataset": "dataset"}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        from importlib import import_module

        return getattr(import_module(f"tundish.packing.{_NEEDS_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
