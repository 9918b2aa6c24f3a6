"""`PackPlan.verify`: it finds whatever does not belong together, and says what it cannot check."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, PlanMismatchError

# Empty samples, on boundaries too, for every order used here.
LENGTHS = np.random.default_rng(11).integers(0, 9, 400) // 3 * 4
ORDER = np.random.default_rng(3).permutation(400)[:350]


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_given_order_is_checked(drop_last: bool) -> None:
    plan = td.pack(LENGTHS, 16, order=ORDER, drop_last=drop_last)
    for same in (
        ORDER,
        ORDER.astype(np.uint16),
        ORDER.tolist(),
        torch.from_numpy(ORDER),
        np.repeat(ORDER, 2)[::2],
    ):
        plan.verify(order=same)
    for threads in (1, 3):
        plan.verify(LENGTHS, order=ORDER, threads=threads)
    with pytest.raises(InvalidInputError, match="order="):
        plan.verify()
    swapped = ORDER.copy()
    first, second = np.flatnonzero(LENGTHS[ORDER])[[5, 9]]
    swapped[[first, second]] = swapped[[second, first]]
    for other in (swapped, ORDER[1:], ORDER[:-1], np.append(ORDER, np.setdiff1d(np.arange(400), ORDER)[0])):
        with pytest.raises(PlanMismatchError):
            plan.verify(order=other)
    empty_first, empty_second = np.flatnonzero(LENGTHS[ORDER] == 0)[:2]
    swapped = ORDER.copy()
    swapped[[empty_first, empty_second]] = swapped[[empty_second, empty_first]]
    with pytest.raises(PlanMismatchError):
        plan.verify(order=swapped)
    for none, error, says in (
        ([0, 0], InvalidInputError, r"order\[1\] names sample 0 again"),
        ([400], InvalidInputError, r"order\[0\] is 400"),
        ([-1], InvalidInputError, r"order\[0\] is -1"),
        ([0.5], InvalidTypeError, "order"),
    ):
        with pytest.raises(error, match=says):
            plan.verify(order=none)


def test_an_order_for_a_plan_made_without_is_refused() -> None:
    for plan in (td.pack(LENGTHS, 16), td.pack(LENGTHS, 16, seed=5)):
        with pytest.raises(PlanMismatchError, match="order was given"):
            plan.verify(order=np.arange(len(LENGTHS)))


def test_other_lengths_are_found() -> None:
    plan = td.pack(LENGTHS, 16, seed=5)
    other = LENGTHS.copy()
    other[np.flatnonzero(other)[3]] -= 1
    with pytest.raises(PlanMismatchError, match="these are not the lengths and the order"):
        plan.verify(other)
    with pytest.raises(PlanMismatchError, match="400"):
        plan.verify(LENGTHS[:-1])
    first = np.flatnonzero(np.diff(LENGTHS))[0]
    swapped = LENGTHS.copy()
    swapped[[first, first + 1]] = swapped[[first + 1, first]]
    with pytest.raises(PlanMismatchError):
        plan.verify(swapped)
    unattached = pickle.loads(pickle.dumps(plan))
    unattached.verify(LENGTHS)


def test_lengths_are_needed(tmp_path: Path) -> None:
    td.pack(LENGTHS, 16).save(tmp_path / "plan")
    with pytest.raises(InvalidInputError, match="lengths"):
        td.PackPlan.load(tmp_path / "plan").verify()
    with pytest.raises(PlanMismatchError):
        td.PackPlan.load(tmp_path / "plan", LENGTHS[1:])
    several = td.pack_datasets([LENGTHS, LENGTHS], 16)
    for wrong in (5, list, "ab", iter([LENGTHS, LENGTHS])):
        with pytest.raises(InvalidTypeError, match="lengths of each dataset"):
            several.verify(wrong)
