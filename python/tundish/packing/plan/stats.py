"""Computes the statistics of a plan in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tundish.packing.plan.readable_plan import ReadablePlan

# Packs that are counted together: some megabytes of temporaries.
PACKS_AT_ONCE = 1 << 18


def plan_stats(plan: ReadablePlan) -> dict[str, int | float]:
    """Compute the statistics that `PackPlan.stats` documents."""
    metadata = plan.metadata
    continued = 0
    cut = 0
    largest = 0
    longest = 0
    piece_before = 0
    was_inside = False
    for start, stop in _slices(len(plan)):
        cu = plan.indices_cu_len[start:stop].astype(np.int64)
        counts = np.diff(cu, prepend=piece_before)
        continues = plan.start_offset[start:stop] > 0
        # A pack that lies inside one sample passes the same sample on; only its first continuation counts.
        inside = continues & (counts == 1)
        passed_on = np.concatenate(([was_inside], inside[:-1]))
        continued += int(continues.sum())
        cut += int((continues & ~passed_on).sum())
        largest = max(largest, int(counts.max(initial=0)))
        longest = max(longest, int(plan.longest[start:stop].max(initial=0)))
        piece_before = int(cu[-1])
        was_inside = bool(inside[-1])
    dropped = plan.num_tokens - metadata["tokens_packed"]
    if dropped:
        cut += _cut_by_tails(plan, metadata["hard"]["tail_start"])
    packs, pieces = len(plan), len(plan.indices)
    return {
        "packs": packs,
        "pieces": pieces,
        "samples": pieces - continued,
        "samples_cut": cut,
        "tokens": plan.num_tokens,
        "tokens_packed": metadata["tokens_packed"],
        "tokens_dropped": dropped,
        "fill": metadata["tokens_packed"] / (packs * plan.max_length) if packs else 1.0,
        "pieces_per_pack": pieces / packs if packs else 0.0,
        "max_pieces_per_pack": largest,
        "longest": longest,
    }


def _slices(total: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, PACKS_AT_ONCE):
        yield start, min(start + PACKS_AT_ONCE, total)


def _cut_by_tails(plan: ReadablePlan, tail_starts: list[int]) -> int:
    """Count the samples whose end is dropped, except those already counted as cut."""
    # The column's own dtype: numpy would convert the whole column for any other.
    streams = np.flatnonzero(tail_starts).astype(plan.dataset_id.dtype)
    # The last pack of each stream ends inside the sample; it was counted if that pack began inside it too.
    last = np.searchsorted(plan.dataset_id, streams, side="right") - 1
    before = np.where(last > 0, plan.indices_cu_len[last - 1], 0)
    alone = plan.indices_cu_len[last] - before == 1
    return int((~(alone & (plan.start_offset[last] > 0))).sum())
