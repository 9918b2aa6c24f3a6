"""Every rank computes alike which rank saves a value that several hold."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tundish.checkpoint.dcp.flattened_state import FlattenedState, flatten_state
from tundish.checkpoint.dcp.saving.ownership import owned_values
from tundish.checkpoint.dcp.saving.state_summary import (
    SummariesByRank,
    digest_of,
    summarize,
    summary_from_json,
    summary_to_json,
    total_bytes,
)
from tundish.errors import InvalidInputError


def summaries_of(held: dict[int, FlattenedState]) -> SummariesByRank:
    """What the ranks know after they exchanged their summaries."""
    members = frozenset(held)
    ranks_of: dict[str, list[int]] = {}
    for rank, leaves in held.items():
        ranks_of.setdefault(summary_to_json(summarize(leaves, rank, members)), []).append(rank)
    return tuple((summary_from_json(told), frozenset(ranks)) for told, ranks in ranks_of.items())


def owners(states: dict[int, dict[str, Any]]) -> dict[str, list[int]]:
    """For each name the ranks that save it."""
    held = {rank: flatten_state(state) for rank, state in states.items()}
    summaries = summaries_of(held)
    found: dict[str, list[int]] = {name: [] for state in states.values() for name in state}
    for rank, leaves in held.items():
        for (name, _), is_owned in zip(leaves, owned_values(rank, leaves, summaries), strict=True):
            if is_owned:
                found[name].append(rank)
    return found


sizes = st.integers(min_value=0, max_value=6)


@hypothesis.given(
    # For each rank which of some named tensors it holds, in an order of its own.
    st.lists(
        st.permutations(range(6)).flatmap(lambda order: sizes.map(lambda n: order[:n])),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.integers(0, 100), min_size=6, max_size=6),
)
def test_every_part_is_saved_by_exactly_one_holder(held: list[list[int]], lengths: list[int]) -> None:
    states = {
        10 + rank: {f"t{number}": torch.empty(lengths[number]) for number in numbers} | {"o": 1}
        for rank, numbers in enumerate(held)
    }
    for name, ranks in owners(states).items():
        assert len(ranks) == 1, (name, ranks)
        assert name in states[ranks[0]]


def test_bytes_are_spread_evenly() -> None:
    state = {f"t{number}": torch.empty(number % 17 + 1, 100) for number in range(200)}
    loads = dict.fromkeys(range(4), 0)
    for name, ranks in owners(dict.fromkeys(range(4), state)).items():
        loads[ranks[0]] += state[name].nbytes
    assert max(loads.values()) - min(loads.values()) <= 17 * 400
    assert max(loads.values()) <= 1.02 * sum(loads.values()) / 4


def test_the_owner_of_a_large_tensor_gets_no_small_ones() -> None:
    state = {"large": torch.empty(3000)} | {f"small{number}": torch.empty(3) for number in range(1000)}
    saved = owners(dict.fromkeys(range(2), state))
    assert sum(ranks != saved["large"] for ranks in saved.values()) == 1000


def test_small_tensors_are_spread_evenly() -> None:
    state = {f"t{number}": torch.empty(0) for number in range(40)}
    counts = [
        len([1 for ranks in owners(dict.fromkeys(range(4), state)).values() if ranks == [r]])
        for r in range(4)
    ]
    assert counts == [10, 10, 10, 10]


def test_objects_are_saved_by_the_lowest_rank_that_has_them() -> None:
    assert owners({3: {"a": 1}, 5: {"a": 2, "b": 3}, 7: {"b": 4}}) == {"a": [3], "b": [5]}


@pytest.mark.parametrize(
    "other",
    [torch.empty(4), torch.empty(3, dtype=torch.int32), "text"],
    ids=["another shape", "another dtype", "no tensor"],
)
def test_different_things_under_one_name_are_refused(other: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=r"'a.w' is a float32 tensor of shape \(3,\) on rank 0 and .* on rank 1"
    ):
        owners({0: {"a": {"w": torch.empty(3)}}, 1: {"a": {"w": other}}})


def test_a_summary_survives_json() -> None:
    leaves = flatten_state({"a": {"b": torch.empty(3, 4), "c": None}, "d": [torch.empty(2), {"e": 1}]})
    summary = summarize(leaves, 0, {0})
    assert list(summary) == ["a.b", "a.c", "d.0", "d.1.e"]
    assert summary_from_json(summary_to_json(summary)) == summary
    assert digest_of(summary_from_json(summary_to_json(summary))) == digest_of(summary)
    assert digest_of(summarize(flatten_state({"a": {"b": torch.empty(3, 5)}}), 0, {0})) != digest_of(summary)


def test_total_bytes_counts_every_part_once() -> None:
    states = {rank: {"w": torch.empty(1 << 20), f"own{rank}": torch.empty(1 << 18)} for rank in range(4)}
    held = {rank: flatten_state(state) for rank, state in states.items()}
    assert total_bytes(summaries_of(held)) == pytest.approx((1 << 22) + 4 * (1 << 20), rel=0.01)
