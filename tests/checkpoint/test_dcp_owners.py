"""Who saves what several ranks hold, worked out by each rank for itself."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tundish.checkpoint.dcp.leaves import Leaves, leaves_of
from tundish.checkpoint.dcp.outline import (
    Census,
    digest_of,
    outline_from_json,
    outline_of,
    outline_to_json,
    total_bytes,
)
from tundish.checkpoint.dcp.owners import owned_by
from tundish.errors import InvalidInputError


def census_of(held: dict[int, Leaves]) -> Census:
    """What ranks that told each other know."""
    members = frozenset(held)
    ranks_of: dict[str, list[int]] = {}
    for rank, leaves in held.items():
        ranks_of.setdefault(outline_to_json(outline_of(leaves, rank, members)), []).append(rank)
    return tuple((outline_from_json(told), frozenset(ranks)) for told, ranks in ranks_of.items())


def owners(states: dict[int, dict[str, Any]]) -> dict[str, list[int]]:
    """For each name the ranks that save it."""
    held = {rank: leaves_of(state) for rank, state in states.items()}
    census = census_of(held)
    found: dict[str, list[int]] = {name: [] for state in states.values() for name in state}
    for rank, leaves in held.items():
        for (name, _), is_owned in zip(leaves, owned_by(rank, leaves, census), strict=True):
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
def test_everything_that_some_rank_holds_is_saved_by_exactly_one_that_holds_it(
    held: list[list[int]], lengths: list[int]
) -> None:
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


def test_a_large_tensor_leaves_the_small_ones_to_the_others() -> None:
    state = {"large": torch.empty(3000)} | {f"small{number}": torch.empty(3) for number in range(1000)}
    saved = owners(dict.fromkeys(range(2), state))
    assert sum(ranks != saved["large"] for ranks in saved.values()) == 1000


def test_small_tensors_are_spread_too() -> None:
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


def test_an_outline_says_the_same_to_other_ranks() -> None:
    leaves = leaves_of({"a": {"b": torch.empty(3, 4), "c": None}, "d": [torch.empty(2), {"e": 1}]})
    outline = outline_of(leaves, 0, {0})
    assert list(outline) == ["a.b", "a.c", "d.0", "d.1.e"]
    assert outline_from_json(outline_to_json(outline)) == outline
    assert digest_of(outline_from_json(outline_to_json(outline))) == digest_of(outline)
    assert digest_of(outline_of(leaves_of({"a": {"b": torch.empty(3, 5)}}), 0, {0})) != digest_of(outline)


def test_the_size_of_the_whole_counts_everything_once() -> None:
    states = {rank: {"w": torch.empty(1 << 20), f"own{rank}": torch.empty(1 << 18)} for rank in range(4)}
    held = {rank: leaves_of(state) for rank, state in states.items()}
    assert total_bytes(census_of(held)) == pytest.approx((1 << 22) + 4 * (1 << 20), rel=0.01)
