"""`piece_slices`: the pieces of a plan, some packs at a time, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["PieceSlice", "piece_slices"]

# Packs that are read together. A pack has some pieces, so this takes some tens of megabytes.
PACKS_AT_ONCE = 1 << 16


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


def piece_slices(plan: PackPlan) -> Iterator[PieceSlice]:
    """Iterate over the packs of a plan. Pieces without tokens are left out.

    Raises:
        InvalidInputError: The plan does not say where pieces end, because it has no lengths.
    """
    if not plan.has_lengths and plan.piece_stop is None:
        raise InvalidInputError(
            "the plan does not say where its pieces end: attach the lengths with plan.with_lengths(…), or load it "
            "with PackPlan.load(path, lengths=…)"
        )
    offsets = np.cumsum([0, *plan.num_samples[:-1]])
    for first in range(0, len(plan), PACKS_AT_ONCE):
        batch = plan.lookup(np.arange(first, min(first + PACKS_AT_ONCE, len(plan)), dtype=np.int64))
        numbers = np.repeat(np.arange(len(batch)), np.diff(batch.piece_cu))
        has_tokens = batch.stop > batch.start
        numbers, sample = numbers[has_tokens], batch.sample[has_tokens]
        dataset = batch.dataset_id[numbers]
        if plan.global_pack:
            dataset = np.searchsorted(offsets, sample, side="right") - 1
            sample = sample - offsets[dataset]
        counts = np.bincount(numbers, minlength=len(batch))
        yield PieceSlice(counts, dataset, sample, batch.start[has_tokens], batch.stop[has_tokens])
