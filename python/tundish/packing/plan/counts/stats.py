"""Computes the statistics of a plan in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tundish.packing.plan.readable_plan import ReadablePlan

# Packs that are counted together: some megabytes of temporaries.
PACKS_AT_ONCE = 1 << 18
# What `plan.json` counts of packs that are left out or repeated.
_MULTIPLE = ("packs", "tokens", "padding_align", "samples", "samples_overlong")


def plan_stats(plan: ReadablePlan) -> dict[str, int | float]:
    """Compute the statistics that `PackPlan.stats` documents."""
    metadata = plan.metadata
    packs, pieces, packed = len(plan), len(plan.indices), metadata["tokens_packed"]
    room = packs * plan.max_length
    multiple = metadata.get("multiple") or dict.fromkeys(_MULTIPLE, 0)
    repeats = plan.packs_repeated > 0
    repeated = multiple["tokens"] if repeats else 0
    padding_align = 0
    if plan.mode == "hard":
        counted = _count_hard(plan, metadata)
    else:
        counted = _count_whole(metadata["whole"], multiple)
        sign = 1 if repeats else -1
        padding_align = metadata["whole"]["padding_align"] + sign * multiple["padding_align"]
    return {
        "packs": packs,
        "pieces": pieces,
        **counted,
        "tokens": plan.num_tokens,
        "tokens_packed": packed,
        "tokens_dropped": plan.num_tokens - packed,
        "packs_dropped": 0 if repeats else multiple["packs"],
        "packs_repeated": plan.packs_repeated,
        "tokens_repeated": repeated,
        "padding": room - packed - repeated,
        "padding_align": padding_align,
        "fill": (packed + repeated) / room if packs else 1.0,
        "pieces_per_pack": pieces / packs if packs else 0.0,
        **_largest(plan),
    }


def _largest(plan: ReadablePlan) -> dict[str, int]:
    most = 0
    longest = 0
    before = 0
    for start, stop in _slices(len(plan)):
        cu = plan.indices_cu_len[start:stop].astype(np.int64)
        most = max(most, int(np.diff(cu, prepend=before).max(initial=0)))
        longest = max(longest, int(plan.longest[start:stop].max(initial=0)))
        before = int(cu[-1])
    return {"max_pieces_per_pack": most, "longest": longest}


def _count_whole(whole: Mapping[str, Any], multiple: Mapping[str, Any]) -> dict[str, int]:
    """Count the samples of a plan of whole samples."""
    is_cut = whole["overlong"] in ("split", "truncate")
    return {
        "samples": whole["samples_packed"] - multiple["samples"],
        "samples_cut": whole["samples_overlong"] - multiple["samples_overlong"] if is_cut else 0,
        "samples_empty": whole["samples_empty"],
        "samples_overlong": whole["samples_overlong"],
    }


def _count_hard(plan: ReadablePlan, metadata: Mapping[str, Any]) -> dict[str, int]:
    """Count the samples of a plan of hard packing."""
    continued = 0
    cut = 0
    piece_before = 0
    was_inside = False
    # Packs that come again hold no more samples.
    packs = len(plan) - plan.packs_repeated
    for start, stop in _slices(packs):
        cu = plan.indices_cu_len[start:stop].astype(np.int64)
        counts = np.diff(cu, prepend=piece_before)
        continues = plan.start_offset[start:stop] > 0
        # A pack that lies inside one sample passes the same sample on; only its first continuation counts.
        inside = continues & (counts == 1)
        passed_on = np.concatenate(([was_inside], inside[:-1]))
        continued += int(continues.sum())
        cut += int((continues & ~passed_on).sum())
        piece_before = int(cu[-1])
        was_inside = bool(inside[-1])
    if plan.num_tokens > metadata["tokens_packed"]:
        cut += _cut_by_tails(plan, packs, metadata["hard"]["tail_start"])
    return {
        "samples": piece_before - continued,
        "samples_cut": cut,
        "samples_empty": metadata["hard"]["empty_on_boundary"],
        "samples_overlong": 0,
    }


def _slices(total: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, PACKS_AT_ONCE):
        yield start, min(start + PACKS_AT_ONCE, total)


def _cut_by_tails(plan: ReadablePlan, packs: int, tail_starts: list[int]) -> int:
    """Count the samples whose end is dropped, except those already counted as cut."""
    dataset_id = plan.dataset_id[:packs]
    # The column's own dtype: numpy would convert the whole column for any other.
    streams = np.flatnonzero(tail_starts).astype(dataset_id.dtype)
    # The last pack of each stream ends inside the sample; it was counted if that pack began inside it too.
    last = np.searchsorted(dataset_id, streams, side="right") - 1
    before = np.where(last > 0, plan.indices_cu_len[last - 1], 0)
    alone = plan.indices_cu_len[last] - before == 1
    return int((~(alone & (plan.start_offset[last] > 0))).sum())
