"""The first rank decides which rank saves a value that several hold."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tundish.checkpoint.dcp.plan import LocalValue, assign_values, local_values_of
from tundish.checkpoint.dcp.state import flatten_state
from tundish.errors import InvalidInputError


def owners(states: dict[int, dict[str, Any]]) -> dict[str, list[int]]:
    """For each name the ranks that save it."""
    held = [local_values_of(flatten_state(state), rank) for rank, state in states.items()]
    found: dict[str, list[int]] = {name: [] for state in states.values() for name in state}
    for rank, values, numbers in zip(states, held, assign_values(held, list(states)).owned, strict=True):
        for number in numbers:
            value = values[number]
            assert value is not None
            found[value.name].append(rank)
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


def test_blocks_that_do_not_make_up_the_tensor_are_refused() -> None:
    def block(first: int, last: int) -> list[LocalValue | None]:
        return [LocalValue("w", '["w"]', "float32", "8", f"{first}", f"{last - first}")]

    assigned = assign_values([block(0, 4), block(4, 8), block(0, 4)], [0, 1, 2])
    assert (assigned.owned, assigned.total_bytes) == ([[0], [0], []], 32)
    for held in (
        [block(0, 4)],
        [block(0, 4), block(4, 7)],
        [block(0, 8), block(4, 8)],
        [block(0, 4), block(0, 5)],
    ):
        with pytest.raises(InvalidInputError, match=r"'w' has 8 elements, and its blocks"):
            assign_values(held, list(range(len(held))))
