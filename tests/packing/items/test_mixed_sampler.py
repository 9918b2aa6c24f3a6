"""`PackedBatchSampler` over a mix: its order is kept, and a run goes on under new weights."""

from __future__ import annotations

import json
from itertools import chain, islice
from typing import Any

import pytest
from support.packing.samplers import global_batches, plan_of, samplers_of

import tundish as td
from tundish.errors import InvalidInputError, StateMismatchError

PLANS = [plan_of(50), plan_of(70)]
MIX = td.mix(PLANS, [2, 1], num_packs=90, seed=4)


def test_the_order_of_the_mix_is_kept_on_any_number_of_ranks() -> None:
    for ranks in (1, 2, 3):
        samplers = samplers_of(MIX, 6, ranks)
        assert [sampler.shuffle for sampler in samplers] == [False] * ranks
        for epoch in range(2):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            assert list(chain(*global_batches(samplers))) == list(range(90))


@pytest.mark.parametrize("option", ["shuffle", "group_by_longest"])
def test_options_that_would_undo_the_shares_are_refused(option: str) -> None:
    options: dict[str, Any] = {option: True}
    with pytest.raises(InvalidInputError, match=f"{option}=True would undo the shares of the mix"):
        td.PackedBatchSampler(MIX, 2, 0, 1, **options)


def stopped_after(mix: td.PackMix, steps: int) -> tuple[list[list[int]], dict[str, Any]]:
    """The global batches of a run on two ranks that stopped, and its state."""
    samplers = samplers_of(mix, 6, 2)
    batches = [list(chain(*parts)) for parts in islice(zip(*samplers, strict=True), steps)]
    state = samplers[0].state_dict()
    assert state["step"] == steps
    return batches, json.loads(json.dumps(state))


def resumed(mix: td.PackMix, state: dict[str, Any], ranks: int) -> list[list[int]]:
    samplers = samplers_of(mix, 6, ranks)
    for sampler in samplers:
        sampler.load_state_dict(state)
    return global_batches(samplers)


def test_a_run_goes_on_in_the_middle_of_a_mix() -> None:
    batches, state = stopped_after(MIX, 7)
    for ranks in (1, 3):
        assert batches + resumed(MIX, state, ranks) == global_batches(samplers_of(MIX, 6, 1))


def test_a_run_goes_on_under_new_weights() -> None:
    batches, state = stopped_after(MIX, 7)
    changed = MIX.resume(weights=[1, 5], after=42)
    batches += resumed(changed, state, 3)
    trained = [changed[place] for batch in batches for place in batch]
    assert trained[:42] == MIX[:42] and trained == changed[:]
    for number, plan in enumerate(PLANS):
        packs = [pack for of, pack in trained if of == number]
        assert len(set(packs[: len(plan)])) == min(len(packs), len(plan))
    # Its own states, those of the first mix, and those of a mix in between.
    again = changed.resume(weights=[1, 1], after=60)
    for mix, steps in ((MIX, 3), (MIX, 7), (changed, 10), (again, 13)):
        assert (
            resumed(again, stopped_after(mix, steps)[1], 1)
            == global_batches(samplers_of(again, 6, 1))[steps:]
        )


def test_states_beyond_the_common_packs_and_of_other_mixes_are_refused() -> None:
    changed = MIX.resume(weights=[1, 5], after=42)
    sampler = td.PackedBatchSampler(changed, 6, 0, 1)
    before = sampler.state_dict()
    other = td.mix(PLANS, [2, 1], num_packs=90, seed=5)
    for mix, steps, message in (
        (MIX, 8, r"after 8 steps of 6 packs, .* resumed after 42 packs: resume it with after=48"),
        (MIX, 15, "resume it with after=90"),
        (other, 3, "saved with another plan"),
        (changed.resume(weights=[1, 1], after=60), 3, "saved with another plan"),
    ):
        with pytest.raises(StateMismatchError, match=message):
            sampler.load_state_dict(stopped_after(mix, steps)[1])
    plan_state = td.PackedBatchSampler(PLANS[0], 6, 0, 1, shuffle=False).state_dict()
    for state in (plan_state, before | {"plan": 3}, before | {"plan": ["x"]}):
        with pytest.raises(StateMismatchError):
            sampler.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="global batch of 4"):
        sampler.load_state_dict(td.PackedBatchSampler(MIX, 4, 0, 1).state_dict())
    assert sampler.state_dict() == before
