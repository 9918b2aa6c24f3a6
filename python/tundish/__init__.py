"""tundish: the plumbing around an LLM training loop.

Importing this does not import torch; what needs torch is imported when it is asked for.
"""

from __future__ import annotations

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from tundish import distributed, errors, packing
from tundish.errors import TundishError
from tundish.packing import Pack, PackedBatchSampler, PackPlan, Piece, pack, pack_datasets

if TYPE_CHECKING:
    from tundish.packing import PackedCollator, PackedDataset

__all__ = [
    "Pack",
    "PackPlan",
    "PackedBatchSampler",
    "PackedCollator",
    "PackedDataset",
    "Piece",
    "TundishError",
    "distributed",
    "errors",
    "pack",
    "pack_datasets",
    "packing",
]

__version__ = _version("tundish")


def __getattr__(name: str) -> Any:
    if name in ("PackedCollator", "PackedDataset"):
        return getattr(packing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
