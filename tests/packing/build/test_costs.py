"""`costs` and `max_cost`: against packing one sample after the other."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.packing.plans import (
    changed,
    columns_of,
)
from support.packing.whole_plan import (
    CostLimit,
    Options,
    Part,
    best_fit_by_cost,
    expected_columns,
    packed_in_order,
    parts_of,
)

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, PlanMismatchError

MODES = ["best_fit", "ordered", "sequential"]


class Case(NamedTuple):
    """What is packed: lengths, order and costs of each stream, and how it is asked for."""

    streams: list[list[int]]
    orders: list[list[int]]
    limits: list[CostLimit]
    options: Options
    costs: Any
    plan: td.PackPlan


@st.composite
def cases(draw: Any) -> Case:
    mode = draw(st.sampled_from(MODES))
    align = draw(st.sampled_from([1, 1, 3]))
    max_length = align * draw(st.integers(1, 12))
    options = Options(
        max_length,
        overlong=draw(st.sampled_from(["truncate", "drop"])),
        window=draw(st.none() | st.integers(1, 5)) if mode == "ordered" else None,
        max_samples=draw(st.none() | st.integers(1, 4)),
        align=align,
    )
    max_cost = draw(st.integers(0, 9))
    cost = st.just(0) | st.integers(0, max_cost)
    pair = st.tuples(st.integers(0, 3) | st.integers(0, 2 * max_length), cost)
    datasets = draw(st.lists(st.lists(pair, max_size=25), min_size=1, max_size=3))
    lengths = [[length for length, _ in dataset] for dataset in datasets]
    costs = [[cost for _, cost in dataset] for dataset in datasets]
    arguments = {
        "mode": mode,
        "overlong": options.overlong,
        "window": options.window,
        "max_samples": options.max_samples,
        "align": align,
        "max_cost": max_cost,
        "threads": draw(st.sampled_from([1, 3])),
    }
    if len(datasets) == 1 and draw(st.booleans()):
        order = draw(st.permutations(range(len(lengths[0]))))[: draw(st.integers(0, 25))]
        plan = td.pack(lengths[0], max_length, order=order, costs=costs[0], **arguments)
        return Case(lengths, [order], [CostLimit(costs[0], max_cost)], options, costs[0], plan)
    seed, global_pack = draw(st.none() | st.integers(0, 2**32 - 1)), draw(st.booleans())
    plan = td.pack_datasets(lengths, max_length, seed=seed, global_pack=global_pack, costs=costs, **arguments)
    given_costs = costs
    if global_pack:
        lengths, costs = [list(chain.from_iterable(lengths))], [list(chain.from_iterable(costs))]
    orders = [np.arange(len(stream)) for stream in lengths]
    if seed is not None and mode != "best_fit":
        random = np.random.RandomState(seed)
        for order in orders:
            random.shuffle(order)
    limits = [CostLimit(column, max_cost) for column in costs]
    return Case(lengths, [order.tolist() for order in orders], limits, options, given_costs, plan)


def expected_packs(case: Case) -> list[list[list[Part]]]:
    """The packs of each stream."""
    plan = case.plan
    random = np.random.RandomState(plan.seed or 0)
    found = []
    for lengths, order, limit in zip(case.streams, case.orders, case.limits, strict=True):
        parts = parts_of(lengths, order, case.options)
        if plan.mode == "best_fit":
            is_seeded = plan.seed is not None
            found.append(best_fit_by_cost(parts, case.options, limit, random, is_seeded=is_seeded))
        else:
            window = 1 if plan.mode == "sequential" else case.options.window or 64
            found.append(packed_in_order(parts, case.options, window, limit))
    return found


@given(cases())
def test_agrees_with_the_definition(case: Case) -> None:
    plan = case.plan
    assert columns_of(plan) == expected_columns(expected_packs(case), case.options.overlong == "truncate")
    for pack in plan:
        limit = case.limits[pack.dataset_id]
        assert sum(limit.costs[piece.sample] for piece in pack.pieces) <= limit.max_cost
    order = case.orders[0] if plan.metadata["order"] == "given" else None
    plan.verify(order=order, costs=case.costs)
    assert plan.ledger()["packed"] == plan.stats()["tokens_packed"]


RANDOM = np.random.default_rng(7)
LENGTHS = RANDOM.integers(1, 700, 20_000)
IMAGES = RANDOM.choice([0, 0, 0, 1, 2, 7], 20_000)


@pytest.mark.parametrize("mode", MODES)
def test_large_plans_verify(mode: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": mode, "seed": 3, "costs": IMAGES, "max_cost": 8}
    plan = td.pack(LENGTHS, 70_000, **options, threads=1)
    plan.verify(costs=IMAGES)
    written = td.pack(LENGTHS, 70_000, **options, out=tmp_path / "plan", threads=2)
    assert written.metadata == plan.metadata
    for name, column in plan.arrays().items():
        assert np.array_equal(column, written.arrays()[name])
    loaded = td.PackPlan.load(tmp_path / "plan", LENGTHS)
    assert loaded.max_cost == 8
    loaded.verify(costs=IMAGES.astype(np.uint8))


def test_costs_that_never_limit_change_no_number_of_packs() -> None:
    free = td.pack(LENGTHS, 4096, mode="best_fit", costs=IMAGES, max_cost=10**12)
    assert len(free) == len(td.pack(LENGTHS, 4096, mode="best_fit"))
    ordered = td.pack(LENGTHS, 4096, mode="ordered", costs=IMAGES, max_cost=10**12)
    assert ordered.arrays()["indices"].tolist() == td.pack(LENGTHS, 4096, mode="ordered").indices.tolist()


def test_squares_of_lengths_are_exact() -> None:
    lengths = np.array([3, 4, 5, 2])
    plan = td.pack(lengths, 100, mode="sequential", costs=lengths**2, max_cost=25)
    assert [[piece.sample for piece in pack.pieces] for pack in plan] == [[0, 1], [2], [3]]
    huge = td.pack([1, 1, 1], 8, mode="best_fit", costs=[2**62, 2**62 - 1, 1], max_cost=2**63 - 1)
    assert len(huge) == 2


@pytest.mark.parametrize("mode", MODES)
def test_samples_that_cost_too_much_are_refused(mode: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"mode": mode, "max_cost": 5, "out": tmp_path / "plan"}
    with pytest.raises(InvalidInputError) as caught:
        td.pack_datasets([[5, 5], [3, 2, 4]], 8, costs=[[5, 6], [1, 9, 9]], **arguments)
    text = str(caught.value)
    for said in ("3 samples", "max_cost=5", "sample 1 of dataset 1 with 9"):
        assert said in text, text
    assert list(tmp_path.iterdir()) == []
    # Samples that are not packed cost nothing.
    left_out = td.pack(
        [0, 20, 5, 5], 8, overlong="drop", costs=[9, 9, 9, 5], order=[0, 1, 3], mode=mode, max_cost=5
    )
    assert left_out.indices.tolist() == [3]


def test_verify_needs_the_costs() -> None:
    lengths, costs = [5, 3, 2, 4], [1, 2, 3, 4]
    plan = td.pack(lengths, 8, mode="best_fit", costs=costs, max_cost=5)
    with pytest.raises(InvalidInputError, match=r"made with costs .*pass the same"):
        plan.verify()
    for other in ([1, 2, 3, 3], [4, 3, 2, 1]):
        with pytest.raises(PlanMismatchError):
            plan.verify(costs=other)
    with pytest.raises(PlanMismatchError, match="made without"):
        td.pack(lengths, 8, mode="best_fit").verify(costs=costs)
    for change in ({"max_cost": 6}, {"max_cost": None}):
        with pytest.raises(PlanMismatchError):
            changed(plan, **change).verify(lengths, costs=costs)


def test_fingerprints_tell_costs_apart() -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"costs": [1, 2, 1], "max_cost": 4},
        {"costs": [1, 2, 1], "max_cost": 5},
        {"costs": [1, 1, 2], "max_cost": 4},
    ]
    assert len({td.pack([5, 3, 2], 8, mode="best_fit", **choice).fingerprint for choice in choices}) == 4
    same = td.pack([5, 3, 2], 8, mode="best_fit", costs=np.array([1, 2, 1], np.uint8), max_cost=4)
    assert same.fingerprint == td.pack([5, 3, 2], 8, mode="best_fit", **choices[1]).fingerprint


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"costs": [1, 1, 1]}, InvalidInputError, "costs is given, and max_cost is not"),
        ({"max_cost": 1}, InvalidInputError, "max_cost is given, and costs is not"),
        ({"costs": [1, 1], "max_cost": 1}, InvalidInputError, "dataset 0 has 2 costs for 3 samples"),
        ({"costs": [1, 1, -1], "max_cost": 1}, InvalidInputError, "sample 2 has the cost -1"),
        ({"costs": [1.5, 1, 1], "max_cost": 1}, InvalidTypeError, r"costs\[0\]|costs must|costs has"),
        ({"costs": [1, 1, 1], "max_cost": -1}, InvalidInputError, "max_cost is -1"),
        ({"costs": [1, 1, 1], "max_cost": 1.0}, InvalidTypeError, "max_cost must be an integer"),
        (
            {"costs": [1, 1, 1], "max_cost": 1, "overlong": "split"},
            InvalidInputError,
            "overlong='truncate' or 'drop'",
        ),
        ({"costs": [1, 1, 1], "max_cost": 1, "mode": "hard"}, InvalidInputError, "'hard' takes no costs"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        td.pack([5, 3, 8], 8, **{"mode": "best_fit", **arguments})


def test_costs_are_of_as_many_datasets_as_lengths() -> None:
    with pytest.raises(InvalidInputError, match="costs are of 1 datasets, and lengths of 2"):
        td.pack_datasets([[5], [3]], 8, mode="best_fit", costs=[[1]], max_cost=1)
    with pytest.raises(InvalidInputError, match=r"costs\[0\] is a number"):
        td.pack_datasets([[5], [3]], 8, mode="best_fit", costs=[1, 1], max_cost=1)
