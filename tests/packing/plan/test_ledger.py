"""`plan.ledger`: every token is accounted for, by a count of all pieces."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.packing.plans import changed

import tundish as td
from tundish.errors import InvalidInputError, PlanMismatchError
from tundish.packing.inspection import plan_stats

LENGTHS = st.lists(st.lists(st.integers(0, 30), max_size=20), min_size=1, max_size=4)


def counted(plan: td.PackPlan, lengths: list[list[int]]) -> tuple[int, int]:
    """The tokens of all pieces, and of those that are no whole samples."""
    streams = [list(chain.from_iterable(lengths))] if plan.global_pack else lengths
    packed = cut = 0
    for pack in plan:
        for sample, start, stop in pack.pieces:
            assert stop is not None
            packed += stop - start
            if stop - start < streams[pack.dataset_id][sample]:
                cut += stop - start
    return packed, cut


@given(LENGTHS, st.integers(1, 12), st.booleans(), st.booleans())
def test_hard_packing(datasets: list[list[int]], max_length: int, global_pack: bool, drop_last: bool) -> None:
    plan = td.pack_datasets(datasets, max_length, global_pack=global_pack, drop_last=drop_last, seed=1)
    packed, cut = counted(plan, datasets)
    total = sum(map(sum, datasets))
    assert plan.ledger() == {
        "tokens": total,
        "packed": packed,
        "cut": cut,
        "truncated": 0,
        "dropped": total - packed,
        "repeated": 0,
        "capacity": len(plan) * max_length,
        "padding": len(plan) * max_length - packed,
        "padding_align": 0,
    }


@given(
    LENGTHS,
    st.integers(1, 6),
    st.sampled_from(["best_fit", "ordered", "sequential"]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.booleans(),
)
def test_whole_samples(
    datasets: list[list[int]], halves: int, mode: str, overlong: str, global_pack: bool
) -> None:
    max_length = 2 * halves
    options: dict[str, Any] = {"mode": mode, "overlong": overlong, "global_pack": global_pack, "align": 2}
    plan = td.pack_datasets(datasets, max_length, **options)
    packed, cut = counted(plan, datasets)
    lengths = list(chain.from_iterable(datasets))
    left_out = {
        "split": 0,
        "truncate": sum(max(0, length - max_length) for length in lengths),
        "drop": sum(length for length in lengths if length > max_length),
    }[overlong]
    ledger = plan.ledger()
    assert (ledger["tokens"], ledger["packed"], ledger["cut"]) == (sum(lengths), packed, cut)
    assert ledger["truncated"] == (left_out if overlong == "truncate" else 0)
    assert ledger["dropped"] == (left_out if overlong == "drop" else 0)
    assert ledger["tokens"] == ledger["packed"] + ledger["truncated"] + ledger["dropped"]
    assert ledger["capacity"] == len(plan) * max_length == ledger["packed"] + ledger["padding"]
    odd = sum((piece.stop - piece.start) % 2 for pack in plan for piece in pack.pieces if piece.stop)
    assert ledger["padding_align"] == odd


@pytest.mark.parametrize("packs_at_once", [1, 7])
def test_slices_change_nothing(packs_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(0, 60, 500)
    plans = [td.pack(lengths, 64), td.pack(lengths, 64, mode="best_fit"), td.pack([], 64)]
    expected = [plan.ledger() for plan in plans]
    monkeypatch.setattr(plan_stats, "PACKS_AT_ONCE", packs_at_once)
    monkeypatch.setattr(plan_stats, "PIECES_AT_ONCE", 5)
    assert [plan.ledger() for plan in plans] == expected


def test_other_lengths_are_refused() -> None:
    lengths = np.array([5, 3, 9, 2])
    choices: list[dict[str, Any]] = [{}, {"mode": "best_fit", "overlong": "drop"}, {"order": [3, 0, 1, 2]}]
    for options in choices:
        plan = td.pack(lengths, 8, **options)
        bare = changed(plan)
        with pytest.raises(InvalidInputError, match="needs the lengths"):
            bare.ledger()
        assert bare.with_lengths(lengths).ledger() == plan.ledger()
        for other in (lengths + 1, lengths - 1):
            with pytest.raises(PlanMismatchError, match="verify"):
                bare.with_lengths(other).ledger()
