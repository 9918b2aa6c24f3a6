"""`td.mix`: shares, epochs and ends of a mix, against its definition and against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.packing.reference_mix import reference_mix
from support.packing.samplers import plan_of

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, OutOfMemoryError

EXHAUSTED = st.sampled_from(["repeat", "stop", "drop"])
# Exact in binary, so that fractions of them are what the mix sees.
WEIGHTS = st.integers(0, 200).map(lambda eighths: eighths / 8)


def weights_for(plans: int) -> st.SearchStrategy[list[float]]:
    return st.lists(WEIGHTS, min_size=plans, max_size=plans).filter(any)


def assert_in_shares(plans: np.ndarray, weights: list[float]) -> None:
    """After each of these packs, each plan is within one pack of its share."""
    shares = np.array(weights) / sum(weights)
    for plan, share in enumerate(shares):
        taken = np.cumsum(plans == plan)
        asked = share * np.arange(1, len(plans) + 1)
        assert np.abs(taken - asked).max(initial=0) < 1 + 1e-9, (plan, share)


def assert_epochs_are_permutations(mix: td.PackMix) -> None:
    plans, packs = mix.lookup(np.arange(len(mix)))
    for number, plan in enumerate(mix.plans):
        taken = packs[plans == number]
        for start in range(0, len(taken), max(len(plan), 1)):
            epoch = taken[start : start + len(plan)]
            assert len(set(epoch.tolist())) == len(epoch)
            assert len(epoch) < len(plan) or set(epoch.tolist()) == set(range(len(plan)))


@given(
    packs=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    num_packs=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_every_plan_is_within_one_pack_of_its_share_after_any_number_of_packs(
    packs: list[int], num_packs: int, seed: int, data: st.DataObject
) -> None:
    weights = data.draw(weights_for(len(packs)))
    mix = td.mix(list(map(plan_of, packs)), weights, num_packs=num_packs, seed=seed)
    assert len(mix) == num_packs
    assert_in_shares(mix.lookup(np.arange(num_packs))[0], weights)
    assert_epochs_are_permutations(mix)


@given(
    packs=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    exhausted=EXHAUSTED,
    epochs=st.none() | st.integers(1, 3),
    num_packs=st.none() | st.integers(1, 90),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_mix_and_its_resumed_mixes_are_those_of_the_definition(
    packs: list[int],
    exhausted: str,
    epochs: int | None,
    num_packs: int | None,
    seed: int,
    data: st.DataObject,
) -> None:
    stages = [(0, data.draw(weights_for(len(packs))))]
    options: dict[str, Any] = {"exhausted": exhausted, "epochs": epochs, "num_packs": num_packs, "seed": seed}
    defined = {
        **options,
        "epochs": epochs or (None if exhausted == "repeat" and num_packs is not None else 1),
    }
    smallest = min(filter(None, stages[0][1]))
    assume(num_packs is not None or sum(stages[0][1]) / smallest < 100)

    def check(mix: td.PackMix) -> None:
        assert list(mix) == reference_mix(packs, stages, **defined)
        assert_epochs_are_permutations(mix)
        stats = mix.stats()
        assert (stats["packs"], sum(stats["taken"])) == (len(mix), len(mix))
        assert stats["epochs"] == [taken / count for taken, count in zip(stats["taken"], packs, strict=True)]
        assert sum(stats["asked"]) == pytest.approx(1)

    mix = td.mix(list(map(plan_of, packs)), stages[0][1], **options)
    check(mix)
    for _ in range(data.draw(st.integers(0, 2))):
        after = data.draw(st.integers(stages[-1][0], len(mix)))
        weights = data.draw(weights_for(len(packs)))
        assume(num_packs is not None or sum(weights) / min(filter(None, weights)) < 100)
        before, is_later = mix, after > stages[-1][0]
        mix = mix.resume(weights=weights, after=after)
        stages = [stage for stage in stages if stage[0] < after] + [(after, weights)]
        check(mix)
        assert mix[:after] == before[:after]
        assert mix.packs_in_common(before.fingerprint) == (after if is_later else None)


def test_ends_of_a_mix() -> None:
    plans = [plan_of(10), plan_of(30)]
    # Their weights let the first be finished when the second has had 10 of its packs.
    for options, taken in (
        ({}, [30, 30]),
        ({"epochs": 2}, [60, 60]),
        ({"num_packs": 50}, [25, 25]),
        ({"num_packs": 50, "epochs": 1}, [25, 25]),
        ({"num_packs": 500, "epochs": 1}, [30, 30]),
        ({"exhausted": "stop"}, [10, 9]),
        ({"exhausted": "stop", "epochs": 3}, [30, 29]),
        ({"exhausted": "stop", "num_packs": 6}, [3, 3]),
        ({"exhausted": "drop"}, [10, 30]),
        ({"exhausted": "drop", "epochs": 2}, [20, 60]),
        ({"exhausted": "drop", "num_packs": 25}, [10, 15]),
    ):
        assert td.mix(plans, [1, 1], **options).stats()["taken"] == taken, options


def test_plans_that_drop_leave_their_share_to_the_others() -> None:
    mix = td.mix([plan_of(5), plan_of(80), plan_of(40)], [2, 2, 1], exhausted="drop")
    plans, _ = mix.lookup(np.arange(len(mix)))
    left = int(np.flatnonzero(plans == 0)[-1]) + 1
    assert_in_shares(plans[:left], [2, 2, 1])
    last = [int(np.flatnonzero(plans == plan)[-1]) for plan in (1, 2)]
    assert_in_shares(plans[left : min(last) + 1], [0, 2, 1])
    assert mix.stats()["asked"] == [0.4, 0.4, 0.2] and mix.stats()["given"] == [5 / 125, 80 / 125, 40 / 125]


def test_a_seed_gives_other_orders_and_the_same_shares() -> None:
    plans = [plan_of(20), plan_of(20)]
    first, again, other = (td.mix(plans, [3, 2], num_packs=60, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.packs, again.packs) and first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint
    places = np.arange(60)
    assert np.array_equal(first.lookup(places)[0], other.lookup(places)[0])
    assert not np.array_equal(first.packs, other.packs)
    taken = [pack for plan, pack in first if plan == 0]
    assert taken[:16] != taken[20:36] and taken[:20] != list(range(20))


def test_weights_count_in_any_unit_and_from_any_library() -> None:
    plans = [plan_of(20), plan_of(20), plan_of(20)]
    expected = td.mix(plans, [4, 2, 1], num_packs=50).packs.tolist()
    for weights in (
        (0.5, 0.25, 0.125),
        [4e300, 2e300, 1e300],
        np.array([4, 2, 1], dtype=np.int8),
        np.float32([4, 2, 1]),
        [np.float64(4), np.int64(2), True + 0],
    ):
        assert td.mix(plans, weights, num_packs=50).packs.tolist() == expected
    assert sum(td.mix(plans, [1.7e308] * 3, num_packs=9).stats()["asked"]) == pytest.approx(1)


@pytest.mark.parametrize("exhausted", ["repeat", "stop", "drop"])
def test_a_plan_of_weight_0_takes_no_part(exhausted: str) -> None:
    plans = [plan_of(4), plan_of(9), td.pack([], 1)]
    mix = td.mix(plans, [1, 0, 0], exhausted=exhausted)
    assert mix.stats()["taken"] == [4, 0, 0] and mix.stats()["epochs"] == [1.0, 0.0, 0.0]
    # Plans without packs stand before, between and behind others.
    empty = td.pack([], 1)
    mixed = td.mix([empty, plan_of(3), empty, plan_of(2), empty], [0, 1, 0, 1, 0], exhausted="drop")
    assert sorted(mixed) == [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1)]
    assert sorted(mixed.resume(weights=[0, 1, 0, 1, 0], after=3)) == sorted(mixed)


def test_a_tiny_weight_takes_part() -> None:
    mix = td.mix([plan_of(50), plan_of(3)], [1, 1e-300], exhausted="drop")
    assert sorted(mix.stats()["taken"]) == [3, 50]
    assert td.mix([plan_of(50), plan_of(3)], [1, 1e-300], num_packs=1000).stats()["taken"][1] == 0


@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        ([1, -1], InvalidInputError, r"weights\[1\] is -1"),
        ([float("nan"), 1], InvalidInputError, r"weights\[0\] is NaN"),
        ([1, float("inf")], InvalidInputError, r"weights\[1\] is inf"),
        ([1, 10**400], InvalidInputError, r"weights\[1\] is larger than any float"),
        ([0, 0.0], InvalidInputError, "all weights are 0"),
        ([1], InvalidInputError, "1 weight for 2 plans"),
        ([1, 1, 1], InvalidInputError, "3 weights for 2 plans"),
        ([], InvalidInputError, "0 weights for 2 plans"),
        ([1, None], InvalidTypeError, r"weights\[1\] is None"),
        ([1, True], InvalidTypeError, r"weights\[1\] is True"),
        (["1", 1], InvalidTypeError, r"weights\[0\] is '1'"),
        ([[1, 1]] * 2, InvalidTypeError, r"weights\[0\] is \[1, 1\]"),
        ("11", InvalidTypeError, "weights is a str"),
        (1.0, InvalidTypeError, "weights is a float"),
        (np.float64(1), InvalidTypeError, "weights is a float"),
        ({0: 1, 1: 1}, InvalidInputError, "weights are for 0, 1, and the plans are 'plan 0', 'plan 1'"),
        (None, InvalidTypeError, "weights is None"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weights: Any, kind: type[Exception], message: str) -> None:
    plans = [plan_of(3), plan_of(3)]
    with pytest.raises(kind, match=message):
        td.mix(plans, weights)
    with pytest.raises(kind, match=message):
        td.mix(plans, [1, 1]).resume(weights=weights, after=2)


@pytest.mark.parametrize(
    ("plans", "kind", "message"),
    [
        ([], InvalidInputError, "plans is empty"),
        (plan_of(3), InvalidTypeError, "plans is a PackPlan: give a list"),
        ([plan_of(3), [1, 2]], InvalidTypeError, r"plans\[1\] is a list"),
        ([plan_of(3), td.mix([plan_of(3)], [1])], InvalidTypeError, r"plans\[1\] is a PackMix"),
        ([plan_of(3), td.pack([], 1)], InvalidInputError, "plan 1 has no packs, and its weight is 1"),
    ],
)
def test_plans_that_cannot_be_mixed_are_refused(plans: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        td.mix(plans, [1, 1])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"num_packs": 0}, InvalidInputError, "num_packs is 0"),
        ({"num_packs": 1.5}, InvalidTypeError, "num_packs must be an integer"),
        ({"num_packs": 2**60}, InvalidInputError, "num_packs is"),
        ({"num_packs": 2**47}, OutOfMemoryError, "bytes of memory"),
        ({"epochs": 0}, InvalidInputError, "epochs is 0"),
        ({"epochs": 2**48}, InvalidInputError, "the mix would have"),
        ({"epochs": 2**48, "exhausted": "drop"}, InvalidInputError, "the mix would have"),
        ({"seed": -1}, InvalidInputError, "seed is -1"),
        ({"seed": None}, InvalidTypeError, "seed must be an integer"),
        ({"exhausted": "never"}, InvalidInputError, "exhausted is 'never'; it must be one of 'repeat'"),
        ({"exhausted": None}, InvalidTypeError, "exhausted must be one of"),
        ({"share": 1}, InvalidTypeError, "share must be True or False"),
        ({"group": "all"}, InvalidInputError, "share is False: give share=True"),
        ({"progress": "yes"}, InvalidTypeError, "progress"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        td.mix([plan_of(3), plan_of(3)], [1, 1], **options)


def test_a_mix_that_would_never_end_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="give num_packs, fewer epochs"):
        td.mix([plan_of(3), plan_of(3)], [1, 1e-18])


@pytest.mark.parametrize("after", [-1, 7, 1.0, None])
def test_a_place_that_the_mix_lacks_is_refused(after: Any) -> None:
    mix = td.mix([plan_of(3), plan_of(3)], [1, 1])
    with pytest.raises((InvalidInputError, InvalidTypeError), match="after"):
        mix.resume(weights=[1, 1], after=after)


def test_a_plan_that_is_paused_goes_on_where_it_was() -> None:
    mix = td.mix([plan_of(10), plan_of(10)], [1, 1], num_packs=40, seed=3)
    paused = mix.resume(weights=[0, 1], after=8).resume(weights=[1, 1], after=20)
    first = [pack for plan, pack in paused if plan == 0]
    assert first == [pack for plan, pack in mix if plan == 0][: len(first)]
    assert_epochs_are_permutations(paused)
    # What the weights ask for now, from pack 20 on, and what came since.
    stats = paused.stats()
    assert (stats["asked"], stats["since"], stats["given"]) == ([0.5, 0.5], 20, [0.5, 0.5])
    assert paused.packs_in_common(mix.fingerprint) == 8
    assert paused.weights == [1.0, 1.0]


def test_slices_and_iteration_are_those_of_a_list() -> None:
    mix = td.mix([plan_of(700), plan_of(900)], [1, 2])
    places = list(mix)
    assert len(places) == len(mix) and type(mix[5]) is td.packing.MixedPack
    assert mix[-1] == places[-1] and mix[3:2000:7] == places[3:2000:7] and mix[5:0:-2] == places[5:0:-2]
    with pytest.raises(IndexError, match=f"the mix has {len(mix)} packs"):
        mix[len(mix)]
    with pytest.raises(IndexError, match=f"pack {len(mix)} does not exist"):
        mix.lookup([0, len(mix)])
    assert repr(mix).startswith(
        f"PackMix({len(mix)} packs of 2 plans, weights={{plan 0: 1, plan 1: 2}}, exhausted='repeat'"
    )
