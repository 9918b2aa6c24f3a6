"""Computes the statistics of a plan in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from tundish.packing.plan.fields import plan_parts
from tundish.packing.plan.plan_columns import PlanColumns
from tundish.packing.plan.slices import pack_slices

__all__ = ["plan_stats"]

# What `plan.json` counts of packs that are left out or repeated.
_MULTIPLE = ("packs", "tokens", "padding_align", "samples", "samples_overlong")


def plan_stats(plan: PlanColumns) -> dict[str, int | float]:
    """Compute the statistics that `PackPlan.stats` documents."""
    metadata = plan.metadata
    packs, pieces, packed = len(plan), len(plan.indices), metadata["tokens_packed"]
    room = packs * plan.max_length
    multiple = metadata.get("multiple") or dict.fromkeys(_MULTIPLE, 0)
    repeats = plan.packs_repeated > 0
    repeated = multiple["tokens"] if repeats else 0
    counted = _count_samples(plan, metadata, multiple)
    padding_align = sum(part["whole"]["padding_align"] for part in plan_parts(metadata) if part.get("whole"))
    padding_align += multiple["padding_align"] if repeats else -multiple["padding_align"]
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


def _largest(plan: PlanColumns) -> dict[str, int]:
    most = 0
    longest = 0
    before = 0
    for start, stop in pack_slices(plan, 0, len(plan)):
        cu = plan.indices_cu_len[start:stop].astype(np.int64)
        most = max(most, int(np.diff(cu, prepend=before).max(initial=0)))
        longest = max(longest, int(plan.longest[start:stop].max(initial=0)))
        before = int(cu[-1])
    return {"max_pieces_per_pack": most, "longest": longest}


def _count_samples(
    plan: PlanColumns, metadata: Mapping[str, Any], multiple: Mapping[str, Any]
) -> dict[str, int]:
    """Count the samples of all modes."""
    # Packs that come again hold no more samples.
    packs = len(plan) - plan.packs_repeated
    parts = plan_parts(metadata)
    bounds = [0, packs]
    if len(parts) > 1:
        # In the column's own dtype: numpy would convert the whole column for any other.
        numbers = np.arange(len(parts) + 1).astype(plan.dataset_id.dtype)
        bounds = np.searchsorted(plan.dataset_id[:packs], numbers).tolist()
    is_cut = plan.overlong in ("split", "truncate")
    found = {
        "samples": -multiple["samples"],
        "samples_cut": -multiple["samples_overlong"] if is_cut else 0,
        "samples_empty": 0,
        "samples_overlong": 0,
    }
    for part, (first, stop) in zip(parts, pairwise(bounds), strict=True):
        if part.get("hard"):
            counted = _count_hard(plan, first, stop, part)
        else:
            whole = part["whole"]
            counted = {
                "samples": whole["samples_packed"],
                "samples_cut": whole["samples_overlong"] if is_cut else 0,
                "samples_empty": whole["samples_empty"],
                "samples_overlong": whole["samples_overlong"],
            }
        for name, count in counted.items():
            found[name] += count
    return found


def _count_hard(plan: PlanColumns, first: int, end: int, part: Mapping[str, Any]) -> dict[str, int]:
    """Count the samples of packs `first` … `end` - 1, which hard packing made."""
    continued = 0
    cut = 0
    piece_first = piece_before = int(plan.indices_cu_len[first - 1]) if first else 0
    was_inside = False
    for start, stop in pack_slices(plan, first, end):
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
    hard = part["hard"]
    if hard["drop_last"]:
        cut += _cut_by_tails(plan, first, end, hard["tail_start"])
    return {
        "samples": piece_before - piece_first - continued,
        "samples_cut": cut,
        "samples_empty": hard["empty_on_boundary"],
        "samples_overlong": 0,
    }


def _cut_by_tails(plan: PlanColumns, first: int, end: int, tail_starts: list[int]) -> int:
    """Count the samples whose end is dropped, except those already counted as cut."""
    dataset_id = plan.dataset_id[first:end]
    # The column's own dtype: numpy would convert the whole column for any other.
    streams = np.flatnonzero(tail_starts).astype(dataset_id.dtype)
    if first < end:
        # Of a mixed plan, there is one stream.
        streams += dataset_id[0] if len(tail_starts) == 1 else 0
    # The last pack of each stream ends inside the sample; it was counted if that pack began inside it too.
    last = first + np.searchsorted(dataset_id, streams, side="right") - 1
    before = np.where(last > 0, plan.indices_cu_len[last - 1], 0)
    alone = plan.indices_cu_len[last] - before == 1
    return int((~(alone & (plan.start_offset[last] > 0))).sum())
