"""Slices of a plan: packs, or their pieces, that are read together, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError
from tundish.packing.plan.plan_columns import PlanColumns

__all__ = ["PieceSlice", "pack_slices", "piece_slices"]

# Packs and pieces of a slice: some tens of megabytes of temporaries.
PACKS_AT_ONCE = 1 << 18
PIECES_AT_ONCE = 1 << 20


class PieceSlice(NamedTuple):
    """The pieces with tokens of consecutive packs, int64 arrays.

    Attributes:
        counts: Pieces of each pack, (packs,).
        dataset: Dataset of each piece, (pieces,).
        sample: Sample of each piece, counted within its dataset, (pieces,).
        start: First token taken of each piece's sample, (pieces,).
        stop: One past the last token taken, (pieces,).
    """

    counts: NDArray[np.int64]
    dataset: NDArray[np.int64]
    sample: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


def pack_slices(plan: PlanColumns, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut the packs `first` … `end` - 1 into ranges, each with the number of its first pack and one past the last."""
    cu = plan.indices_cu_len
    # In the column's own dtype: numpy would convert the whole column for any other.
    most = np.iinfo(cu.dtype).max
    while first < end:
        before = int(cu[first - 1]) if first else 0
        last = int(np.searchsorted(cu, cu.dtype.type(min(before + PIECES_AT_ONCE, most)), side="right"))
        stop = min(first + PACKS_AT_ONCE, max(last, first + 1), end)
        yield first, stop
        first = stop


def piece_slices(plan: PlanColumns, first: int, end: int) -> Iterator[PieceSlice]:
    """Iterate over the pieces of packs `first` … `end` - 1. Pieces without tokens are left out.

    Raises:
        InvalidInputError: The plan does not say where pieces end, because it has no lengths.
    """
    if not plan.has_lengths and plan.piece_stop is None:
        raise InvalidInputError(
            "the plan does not say where its pieces end: attach the lengths with plan.with_lengths(…), or load it "
            "with PackPlan.load(path, lengths=…)"
        )
    offsets = np.cumsum([0, *plan.num_samples[:-1]])
    for begin, stop in pack_slices(plan, first, end):
        batch = plan.lookup(np.arange(begin, stop, dtype=np.int64))
        numbers = np.repeat(np.arange(len(batch)), np.diff(batch.piece_cu))
        has_tokens = batch.stop != batch.start
        numbers, sample = numbers[has_tokens], batch.sample[has_tokens]
        dataset = batch.dataset_id[numbers]
        if plan.global_pack:
            dataset = np.searchsorted(offsets, sample, side="right") - 1
            sample = sample - offsets[dataset]
        counts = np.bincount(numbers, minlength=len(batch))
        yield PieceSlice(counts, dataset, sample, batch.start[has_tokens], batch.stop[has_tokens])
