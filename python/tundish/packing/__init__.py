"""Packing: from token lengths to a plan of fixed-length sequences, and from the plan to batches.

Importing this package imports none of its modules: each comes when one of its names is used, and torch with the names
that need it.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.packing.arguments import as_integer_array
    from tundish.packing.balancing import balance, micro_batches, shuffled_indices
    from tundish.packing.batches.collator import PackedCollator
    from tundish.packing.batches.context_parallelism import context_parallel, undo_context_parallel
    from tundish.packing.batches.loader import PackLoader, loader
    from tundish.packing.batches.loss_weights import num_items_in_batch, weighted_loss
    from tundish.packing.batches.sampler import PackedBatchSampler
    from tundish.packing.comparing import compare
    from tundish.packing.dataset import PackedDataset
    from tundish.packing.exporting import export
    from tundish.packing.mixing import MixedPack, PackMix, mix
    from tundish.packing.plan import FIELDS, Pack, PackBatch, PackPlan, Piece
    from tundish.packing.planning import pack, pack_datasets
    from tundish.packing.sources.lengths import lengths, open_samples
    from tundish.packing.stream import PackedStream
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.packing.arguments": ("as_integer_array",),
            "tundish.packing.balancing": ("balance", "micro_batches", "shuffled_indices"),
            "tundish.packing.batches.context_parallelism": ("context_parallel", "undo_context_parallel"),
            "tundish.packing.batches.loader": ("PackLoader", "loader"),
            "tundish.packing.batches.loss_weights": ("num_items_in_batch", "weighted_loss"),
            "tundish.packing.planning": ("pack", "pack_datasets"),
            "tundish.packing.batches.collator": ("PackedCollator",),
            "tundish.packing.dataset": ("PackedDataset",),
            "tundish.packing.exporting": ("export",),
            "tundish.packing.mixing": ("MixedPack", "PackMix", "mix"),
            "tundish.packing.comparing": ("compare",),
            "tundish.packing.plan": ("FIELDS", "Pack", "PackBatch", "PackPlan", "Piece"),
            "tundish.packing.batches.sampler": ("PackedBatchSampler",),
            "tundish.packing.sources.lengths": ("lengths", "open_samples"),
            "tundish.packing.stream": ("PackedStream",),
        },
    )

__all__ = [
    "FIELDS",
    "MixedPack",
    "Pack",
    "PackBatch",
    "PackLoader",
    "PackMix",
    "PackPlan",
    "PackedBatchSampler",
    "PackedCollator",
    "PackedDataset",
    "PackedStream",
    "Piece",
    "as_integer_array",
    "balance",
    "compare",
    "context_parallel",
    "export",
    "lengths",
    "loader",
    "micro_batches",
    "mix",
    "num_items_in_batch",
    "open_samples",
    "pack",
    "pack_datasets",
    "shuffled_indices",
    "undo_context_parallel",
    "weighted_loss",
]
