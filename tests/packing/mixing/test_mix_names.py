"""Plans of a mix by name, and what a mix says it takes of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.packing.samplers import plan_of

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, PlanMismatchError

PLANS = {"web": plan_of(30), "code": plan_of(20), "books": plan_of(10)}
WEIGHTS = {"books": 1, "web": 3, "code": 2}


def test_names_give_the_mix_of_the_lists(tmp_path: Path) -> None:
    expected = td.mix(list(PLANS.values()), [3, 2, 1], num_packs=90)
    assert expected.names == ("plan 0", "plan 1", "plan 2")
    for weights in (WEIGHTS, [3, 2, 1]):
        named = td.mix(PLANS, weights, num_packs=90)
        assert np.array_equal(named.packs, expected.packs) and named.fingerprint == expected.fingerprint
        assert named.names == ("web", "code", "books") == pickle.loads(pickle.dumps(named)).names
    assert named.stats()["names"] == ["web", "code", "books"]
    resumed = named.resume(weights={"web": 0, "code": 1, "books": 1}, after=30)
    assert np.array_equal(resumed.packs, expected.resume(weights=[0, 1, 1], after=30).packs)
    assert resumed.names == named.names
    named.save(tmp_path / "mix.json")
    assert td.PackMix.load(tmp_path / "mix.json", PLANS).names == named.names
    assert td.PackMix.load(tmp_path / "mix.json", list(PLANS.values())).names == expected.names


def test_datasets_are_given_by_name_in_any_order() -> None:
    web, code = [[1], [2], [3]], [[4, 4], [5, 5]]
    mix = td.mix({"web": td.pack([1, 1, 1], 1), "code": td.pack([2, 2], 2)}, [1, 1])
    expected = [item["input_ids"].tolist() for item in td.PackedDataset([web, code], mix)]
    found = td.PackedDataset({"code": code, "web": web}, mix)
    assert [item["input_ids"].tolist() for item in found] == expected
    with pytest.raises(
        PlanMismatchError, match="datasets are named 'code', and the plans of the mix are 'web', 'code'"
    ):
        td.PackedDataset({"code": code}, mix)


@pytest.mark.parametrize(
    ("plans", "weights", "kind", "message"),
    [
        (PLANS, {"web": 1, "code": 1}, InvalidInputError, "weights are for 'web', 'code', and the plans are 'web', 'c"),
        (PLANS, WEIGHTS | {"chat": 1}, InvalidInputError, "'chat', and the plans are"),
        (list(PLANS.values()), WEIGHTS, InvalidInputError, "the plans are 'plan 0', 'plan 1', 'plan 2'"),
        ({1: PLANS["web"]}, [1], InvalidTypeError, "plans has the key 1: a name of a plan is a text"),
        ({"web": [1]}, [1], InvalidTypeError, r"plans\['web'\] is a list: give a PackPlan"),
        ({}, [], InvalidInputError, "plans is empty"),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_are_refused(
    plans: Any, weights: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        td.mix(plans, weights)


def test_after_a_resume_the_shares_are_those_asked_for_now() -> None:
    mix = td.mix(PLANS, [1, 1, 0], num_packs=1000)
    changed = mix.resume(weights=[1, 1, 2], after=400)
    stats = changed.stats()
    assert (stats["since"], stats["asked"]) == (400, [0.25, 0.25, 0.5])
    # Within a pack of what was asked for, and not the mean of both stages.
    assert stats["given"] == pytest.approx(stats["asked"], abs=1.01 / 600)
    assert sum(stats["taken"]) == 1000 and stats["taken"][2] == pytest.approx(300, abs=1)
    assert mix.stats()["since"] == 0 and mix.stats()["given"] == pytest.approx([0.5, 0.5, 0.0], abs=1e-3)
    whole = mix.resume(weights=[0, 0, 1], after=1000).stats()
    assert (whole["asked"], whole["given"]) == ([0.0, 0.0, 1.0], [0.0, 0.0, 0.0])


def test_tokens_are_counted_without_padding() -> None:
    random = np.random.default_rng(0)
    lengths = [random.integers(1, 9, 200), random.integers(1, 9, 90)]
    samples = [[[1] * length for length in own.tolist()] for own in lengths]
    # Whole samples, whose packs are not full, and hard packs, of which the last is not.
    plans = [td.pack(lengths[0], 16, mode="sequential"), td.pack(lengths[1], 16, drop_last=False)]
    mix = td.mix(plans, [len(plans[0]), len(plans[1])])
    assert mix.stats()["epochs"] == [1.0, 1.0]
    held = [
        sum(len(item["input_ids"]) for item in td.PackedDataset(own, plan))
        for own, plan in zip(samples, plans, strict=True)
    ]
    assert mix.stats()["tokens"] == held == [int(own.sum()) for own in lengths]
    # A part of an epoch: the packs of a random order hold what all hold on average.
    part = td.mix(plans, [1, 1], num_packs=100)
    found = [0, 0]
    for place, item in zip(part, td.PackedDataset(samples, part), strict=True):
        found[place.plan] += len(item["input_ids"])
    assert part.stats()["tokens"] == pytest.approx(found, rel=0.05)
