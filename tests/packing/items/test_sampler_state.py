"""States of a `PackedBatchSampler`: resuming at the next batch, and what is refused."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packing.samplers import global_batches, options, plan_of, samplers_of, splits
from torch.utils.data import DataLoader

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, StateMismatchError


@given(packs=st.integers(1, 200), split=splits(), epoch=st.integers(0, 9), options=options, data=st.data())
def test_resuming_goes_on_with_the_next_batch_on_any_number_of_ranks(
    packs: int, split: tuple[int, int, int], epoch: int, options: dict[str, bool], data: st.DataObject
) -> None:
    global_batch, ranks, other_ranks = split
    plan = plan_of(packs)
    samplers = samplers_of(plan, global_batch, ranks, seed=1, epoch=epoch, **options)
    whole = global_batches(samplers)
    following = global_batches(samplers_of(plan, global_batch, ranks, seed=1, epoch=epoch + 1, **options))
    stop = data.draw(st.integers(0, len(whole)))
    states = []
    for sampler in samplers:
        assert len(list(islice(iter(sampler), stop))) == stop
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)

    state = json.loads(json.dumps(states[0]))
    resumed = samplers_of(plan, global_batch, other_ranks, seed=1, **options)
    for sampler in resumed:
        sampler.load_state_dict(state)
        sampler.set_epoch(epoch)
        assert (sampler.epoch, sampler.start_step, len(sampler)) == (epoch, stop, len(whole))
        assert sampler.state_dict() == state
    assert global_batches(resumed) == whole[stop:]
    # Once only: the epoch starts at its beginning again.
    assert global_batches(resumed) == whole
    for sampler in resumed:
        sampler.set_epoch(epoch + 1)
    assert global_batches(resumed) == following


# Each spawned worker imports torch anew.
@pytest.mark.parametrize(("start_method", "workers"), [(None, 0), ("fork", 2), ("spawn", 1)])
def test_resuming_under_a_data_loader_that_draws_ahead(start_method: str | None, workers: int) -> None:
    plan = plan_of(60)
    samples = [[number] for number in range(60)]

    def loader_of(sampler: td.PackedBatchSampler) -> DataLoader[Any]:
        return DataLoader(
            td.PackedDataset(samples, plan),
            batch_sampler=sampler,
            collate_fn=tokens_of,
            num_workers=workers,
            multiprocessing_context=start_method,
        )

    first = td.PackedBatchSampler(plan, 3, 1, 2, seed=4)
    whole = list(first)
    state: dict[str, Any] = {}
    for step, batch in enumerate(loader_of(first), start=first.start_step):
        assert batch == whole[step]
        if step == 3:
            state = first.state_dict(steps_done=step + 1)
            break
    second = td.PackedBatchSampler(plan, 3, 1, 2, seed=4)
    second.load_state_dict(state)
    received = []
    for step, batch in enumerate(loader_of(second), start=second.start_step):
        received.append(batch)
        assert second.state_dict(steps_done=step + 1)["step"] == step + 1
    assert received == whole[4:]


def tokens_of(items: list[dict[str, Any]]) -> list[int]:
    return [int(item["input_ids"]) for item in items]


def test_persistent_workers_go_through_epoch_after_epoch() -> None:
    plan = plan_of(24)
    sampler = td.PackedBatchSampler(plan, 4, 0, 1)
    expected = [list(td.PackedBatchSampler(plan, 4, 0, 1, epoch=epoch)) for epoch in range(3)]
    sampler.load_state_dict(td.PackedBatchSampler(plan, 4, 0, 1).state_dict() | {"step": 2})
    loader = DataLoader(
        td.PackedDataset([[number] for number in range(24)], plan),
        batch_sampler=sampler,
        collate_fn=tokens_of,
        num_workers=1,
        persistent_workers=True,
    )
    received = []
    for epoch in range(sampler.epoch, 3):
        sampler.set_epoch(epoch)
        received.append(list(loader))
    assert received == [expected[0][2:], *expected[1:]]


def test_the_newest_iterator_is_the_one_that_counts() -> None:
    sampler = td.PackedBatchSampler(plan_of(12), 2, 0, 1)
    batches = list(sampler)
    assert sampler.state_dict()["step"] == 6
    first = iter(sampler)
    next(first)
    assert (sampler.start_step, sampler.state_dict()["step"]) == (0, 1)
    second = iter(sampler)
    assert sampler.state_dict()["step"] == 0
    assert next(second) == batches[0]
    assert list(first) == batches[1:]
    assert sampler.state_dict()["step"] == 1
    sampler.set_epoch(1)
    assert sampler.state_dict()["step"] == 0


def test_steps_done_must_be_steps_of_this_iteration() -> None:
    sampler = td.PackedBatchSampler(plan_of(12), 2, 0, 1)
    assert sampler.state_dict(steps_done=0)["step"] == 0
    with pytest.raises(InvalidInputError, match=r"steps_done is 1, but .* handed out the steps before 0"):
        sampler.state_dict(steps_done=1)
    sampler.load_state_dict(sampler.state_dict() | {"step": 3})
    iterator = iter(sampler)
    next(iterator)
    assert sampler.state_dict(steps_done=3)["step"] == 3
    assert sampler.state_dict(steps_done=4)["step"] == 4
    for wrong in (1, 5):
        with pytest.raises(
            InvalidInputError, match=r"began at step 3 of epoch 0 and has handed out .* before 4"
        ):
            sampler.state_dict(steps_done=wrong)
    for wrong_type in (True, 3.0, "3"):
        with pytest.raises(InvalidTypeError, match="steps_done must be an integer"):
            sampler.state_dict(steps_done=wrong_type)  # type: ignore[arg-type]


def test_the_state_of_a_finished_epoch() -> None:
    plan = plan_of(6)
    finished = td.PackedBatchSampler(plan, 2, 0, 1, epoch=4)
    assert len(list(finished)) == 3
    state = finished.state_dict()
    at_start = td.PackedBatchSampler(plan, 2, 0, 1)
    at_start.load_state_dict(state)
    assert (at_start.epoch, list(at_start)) == (4, [])
    # A loader that loads the state after the loop has named the epoch does not take the loop back.
    at_next = td.PackedBatchSampler(plan, 2, 0, 1)
    at_next.set_epoch(5)
    at_next.load_state_dict(state)
    assert list(at_next) == list(td.PackedBatchSampler(plan, 2, 0, 1, epoch=5))
    assert at_next.epoch == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "0" * 32}, "saved with another plan: its fingerprint is 0{32}, this sampler's is"),
        ({"packs": 41}, "saved with another plan: its number of packs is 41, this sampler's is 40"),
        ({"global_batch": 6}, r"global batch of 6 packs, this sampler's is 2 x 2 ranks = 4\. Choose"),
        ({"seed": 1}, "saved with seed=1, this sampler has seed=0"),
        ({"shuffle": False}, "saved with shuffle=False, this sampler has shuffle=True"),
        ({"drop_last": True}, "saved with drop_last=True, this sampler has drop_last=False"),
        ({"group_by_longest": True}, "saved with group_by_longest=True"),
        ({"version": 2}, "has version 2, this release of tundish reads 1"),
        ({"version": None}, "has version None"),
        (
            {"kind": "DistributedSampler"},
            "not the state of a PackedBatchSampler: its .kind. is 'DistributedSampler'",
        ),
        ({"step": 11}, "step in the sampler's state is 11, but must be in 0 … 10"),
        ({"step": -1}, "step in the sampler's state is -1"),
        ({"step": True}, "step in the sampler's state is True"),
        ({"step": 1.0}, "step in the sampler's state is 1.0"),
        ({"epoch": "0"}, "epoch in the sampler's state is '0'"),
        ({"epoch": 2**32}, "epoch in the sampler's state is 4294967296"),
        ({"seed": 0.0}, "seed in the sampler's state is 0.0, but must be of type int"),
        ({"shuffle": 1}, "shuffle in the sampler's state is 1, but must be of type bool"),
        ({"plan": None}, "plan in the sampler's state is None, but must be of type str"),
        ({"packs": 10**5000}, "another plan: its number of packs is an integer of 16610 bits"),
        ({"step": 10**5000}, "step in the sampler's state is an integer of 16610 bits"),
        ({"version": True}, "has version True"),
        ({"packs": np.float64(40)}, "packs in the sampler's state is .*40.0.*, but must be of type int"),
        ({"step": np.True_}, "step in the sampler's state is .*True.*, but must be of type int"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    plan = plan_of(40)
    state = td.PackedBatchSampler(plan, 4, 0, 1).state_dict() | {"step": 5}
    sampler = td.PackedBatchSampler(plan, 2, 1, 2, epoch=3)
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(StateMismatchError, match=message):
        sampler.load_state_dict(state | change)
    assert (sampler.epoch, sampler.start_step, sampler.state_dict()["step"]) == (3, 0, 1)
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.start_step, sampler.state_dict()["step"]) == (0, 5, 5)


@pytest.mark.parametrize("kind", [np.int64, np.uint32, torch.tensor])
def test_a_state_may_come_back_with_integers_of_another_type(kind: Any) -> None:
    """A checkpoint library may turn plain integers into numpy's or torch's; only their values count."""
    sampler = td.PackedBatchSampler(plan_of(40), 4, 0, 1, seed=3, epoch=2)
    rest = list(sampler)[5:]
    state = sampler.state_dict() | {"step": 5}
    stored = {key: kind(value) if type(value) is int else value for key, value in state.items()}
    assert sum(type(value) is not type(state[key]) for key, value in stored.items()) == 6
    resumed = td.PackedBatchSampler(plan_of(40), 4, 0, 1, seed=3)
    resumed.load_state_dict(stored)
    assert list(resumed) == rest
    assert resumed.state_dict() == sampler.state_dict() and type(resumed.epoch) is int


@pytest.mark.parametrize("key", ["plan", "packs", "global_batch", "seed", "shuffle", "epoch", "step"])
def test_a_state_that_lacks_a_key_is_refused(key: str) -> None:
    sampler = td.PackedBatchSampler(plan_of(4), 2, 0, 1)
    state = sampler.state_dict()
    del state[key]
    with pytest.raises(StateMismatchError, match=f"lacks {key}: it was cut or edited"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], "state", 1, {}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateMismatchError):
        td.PackedBatchSampler(plan_of(4), 2, 0, 1).load_state_dict(state)


def test_the_state_of_another_plan_of_as_many_packs_is_refused() -> None:
    state = td.PackedBatchSampler(td.pack([4] * 4, 4), 2, 0, 1).state_dict()
    with pytest.raises(StateMismatchError, match="another plan: its fingerprint"):
        td.PackedBatchSampler(td.pack([8] * 2, 4), 2, 0, 1).load_state_dict(state)


def test_pickles() -> None:
    sampler = td.PackedBatchSampler(plan_of(12), 2, 0, 1)
    next(iter(sampler))
    sampler.load_state_dict(sampler.state_dict() | {"step": 2})
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)
