"""Counts the host memory that an export takes on this rank, before any of it is taken.

The count is compared with `staging_limit_bytes`. It is never less than what staging takes, except for what a conversion
needs beside its sources and products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from tundish.checkpoint.hf.export_plan import ExportPlan
from tundish.checkpoint.hf.gather.schedule import Batch, Step
from tundish.checkpoint.placements import Share, shares_for

__all__ = ["Snapshot", "aligned_bytes", "exchange_bytes", "snapshots"]

# Buffers of several tensors are aligned to this, so that any dtype can be viewed in them.
_ALIGNMENT = 64

# Dtype and shape of what a rank keeps of a source.
Snapshot = tuple[torch.dtype, tuple[int, ...]]


def aligned_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes that a tensor takes in a buffer of several."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def snapshots(plan: ExportPlan, rounds: Sequence[Sequence[Batch]], rank: int) -> dict[int, Snapshot]:
    """What `rank` has to keep of each source, by its number, until a lazy save gathers it."""
    needed: dict[int, Snapshot] = {}
    for batch in (batch for batches in rounds for batch in batches):
        for step, source in _sources_of(batch):
            shape = _sent_shape(plan, rank, batch.writer, source)
            if shape is not None:
                needed[source] = plan.sent_dtype(step.unit, source), shape
    return needed


def exchange_bytes(plan: ExportPlan, rounds: Sequence[Sequence[Batch]], rank: int) -> int:
    """What exchanges and conversions take beside the files, in the round in which they take most."""
    return max((sum(_batch_bytes(plan, batch, rank) for batch in batches) for batches in rounds), default=0)


def _batch_bytes(plan: ExportPlan, batch: Batch, rank: int) -> int:
    if batch.writer == rank:
        made = [product for step in batch.steps if step.unit.convert for product in step.unit.products]
        received = sum(_received_bytes(plan, rank, step, source) for step, source in _sources_of(batch))
        return sum(map(plan.product_bytes, made)) + received
    # A sent part may have to be converted, or made contiguous.
    return sum(
        math.prod(shape) * plan.sent_dtype(step.unit, source).itemsize
        for step, source in _sources_of(batch)
        if (shape := _sent_shape(plan, rank, batch.writer, source)) is not None
    )


def _received_bytes(plan: ExportPlan, rank: int, step: Step, source: int) -> int:
    """Bytes outside of the files: the whole tensor where it is converted, and parts that are not contiguous in it."""
    if not plan.is_sharded[source]:
        return 0
    tensor = plan.tensors[source]
    itemsize = plan.sent_dtype(step.unit, source).itemsize
    apart = sum(
        math.prod(share.shape)
        for share in shares_for(tensor, rank)
        if share.rank != rank and not _is_contiguous(share, tuple(tensor.shape))
    )
    return (apart + (tensor.numel() if step.unit.convert else 0)) * itemsize


def _sent_shape(plan: ExportPlan, rank: int, writer: int, source: int) -> tuple[int, ...] | None:
    """The shape of what `rank` gives to `writer` of a source; None where it gives nothing."""
    tensor = plan.tensors[source]
    if not plan.is_sharded[source]:
        return tuple(tensor.shape) if rank == writer else None
    shapes = [share.shape for share in shares_for(tensor, writer) if share.rank == rank]
    return shapes[0] if shapes else None


def _sources_of(batch: Batch) -> Iterator[tuple[Step, int]]:
    return ((step, source) for step in batch.steps for source in step.unit.sources)


def _is_contiguous(share: Share, shape: tuple[int, ...]) -> bool:
    """Whether a part is one run of the first dimension and all of the others."""
    whole = all(runs == ((0, size),) for runs, size in zip(share.runs[1:], shape[1:], strict=True))
    return whole and len(share.runs[0]) == 1
