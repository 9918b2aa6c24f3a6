"""`PackedBatchSampler`: its order on any number of ranks, its state, and a mix, whose order is kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.distributed.rank_processes import preload
from support.packing.samplers import global_batches, options, plan_of, samplers_of, splits
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, StateMismatchError


def mixed_plan(packs: int, seed: int = 0) -> td.PackPlan:
    """A plan whose packs differ widely in their longest piece."""
    lengths = np.random.default_rng(seed).lognormal(3, 1.2, 40 * packs).astype(np.int64) + 1
    order = np.arange(len(lengths))
    plan = td.pack(lengths, 512, order=order)
    assert len(plan) >= packs
    return plan


@given(
    packs=st.integers(0, 200),
    split=splits(),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**32 - 1),
    options=options,
)
def test_ranks_share_each_epoch_and_take_the_same_number_of_steps(
    packs: int, split: tuple[int, int, int], seed: int, epoch: int, options: dict[str, bool]
) -> None:
    global_batch, ranks, other_ranks = split
    plan = plan_of(packs)
    samplers = samplers_of(plan, global_batch, ranks, seed=seed, epoch=epoch, **options)
    steps = packs // global_batch if options["drop_last"] else (packs + global_batch - 1) // global_batch
    batches = global_batches(samplers)

    assert [len(sampler) for sampler in samplers] == [steps] * ranks
    assert len(batches) == steps
    assert all(len(batch) == global_batch for batch in batches)
    taken = Counter(pack for batch in batches for pack in batch)
    assert set(taken) <= set(range(packs))
    if options["drop_last"]:
        assert all(count == 1 for count in taken.values())
    elif packs:
        assert set(taken) == set(range(packs))
        assert max(taken.values()) - min(taken.values()) <= 1
    if not options["shuffle"]:
        flat = [pack for batch in batches for pack in batch]
        assert flat == [position % packs for position in range(steps * global_batch)]
    others = samplers_of(plan, global_batch, other_ranks, seed=seed, epoch=epoch, **options)
    assert global_batches(others) == batches
    # Without set_epoch, the same epoch again.
    assert global_batches(samplers) == batches


def test_each_epoch_and_seed_has_an_order_of_its_own() -> None:
    plan = plan_of(64)
    orders = set()
    for seed in (0, 1, 2**32 - 1):
        sampler = td.PackedBatchSampler(plan, 8, 0, 1, seed)
        for epoch in (0, 1, 2, 2**32 - 1):
            sampler.set_epoch(epoch)
            orders.add(tuple(map(tuple, sampler)))
            assert list(sampler) == list(td.PackedBatchSampler(plan, 8, 0, 1, seed, epoch))
    assert len(orders) == 12


def test_the_order_is_the_documented_one_on_every_version() -> None:
    # A seed must give the same order in every version, or a saved state resumes at other packs.
    order = np.arange(20)
    np.random.RandomState([7, 3]).shuffle(order)
    sampler = td.PackedBatchSampler(plan_of(20), 5, 0, 1, seed=7, epoch=3)
    assert list(sampler) == order.reshape(4, 5).tolist()
    assert next(iter(sampler)) == [17, 18, 5, 11, 6]
    grouped = td.PackedBatchSampler(plan_of(260), 2, 0, 2, seed=7, epoch=3, group_by_longest=True)
    assert list(grouped)[64] == [239, 255]


@given(packs=st.integers(1, 2000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 2**32 - 1))
def test_the_order_is_that_of_numpy(packs: int, seed: int, epoch: int) -> None:
    order = np.arange(packs)
    np.random.RandomState([seed, epoch]).shuffle(order)
    sampler = td.PackedBatchSampler(plan_of(packs), packs, 0, 1, seed=seed, epoch=epoch)
    assert list(sampler) == [order.tolist()]


@pytest.mark.parametrize("drop_last", [True, False])
def test_grouping_gives_a_step_packs_of_like_longest(drop_last: bool) -> None:
    plan = mixed_plan(4000)
    longest = np.asarray(plan.longest)

    def spread(group: bool) -> np.ndarray[Any, Any]:
        ranks = samplers_of(plan, 16, 4, seed=3, drop_last=drop_last, group_by_longest=group)
        return longest[np.array(global_batches(ranks))].std(axis=1)

    assert np.median(spread(True)) < 0.05 * np.median(spread(False))


def test_grouping_keeps_steps_and_ranks_random() -> None:
    plan = mixed_plan(8000)
    longest = np.asarray(plan.longest)
    ranks = samplers_of(plan, 16, 4, seed=3, group_by_longest=True)
    cost = longest[np.array(global_batches(ranks))].astype(float)
    steps = cost.mean(axis=1)
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1]) < 0.15
    by_rank = cost.reshape(len(steps), 4, 4).mean(axis=(0, 2))
    assert by_rank.max() / by_rank.min() < 1.02
    first = global_batches(ranks)
    for sampler in ranks:
        sampler.set_epoch(1)
    partners = {frozenset(batch) for batch in first} & {frozenset(batch) for batch in global_batches(ranks)}
    assert not partners


def test_what_a_sampler_was_made_with_cannot_be_changed() -> None:
    sampler = td.PackedBatchSampler(plan_of(40), 4, 0, 2, seed=3)
    facts = {
        "batch_size": 4,
        "rank": 0,
        "world_size": 2,
        "seed": 3,
        "shuffle": True,
        "drop_last": False,
        "group_by_longest": False,
        "global_batch": 8,
        "epoch": 0,
        "start_step": 0,
    }
    for name, value in facts.items():
        assert getattr(sampler, name) == value
        with pytest.raises(AttributeError, match=name):
            setattr(sampler, name, value)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"batch_size": 0}, InvalidInputError, "batch_size is 0; it must be in 1"),
        ({"batch_size": -3}, InvalidInputError, "batch_size is -3; it must be in 1"),
        ({"batch_size": True}, InvalidTypeError, "batch_size must be an integer, not True"),
        ({"batch_size": 2.0}, InvalidTypeError, "batch_size must be an integer, not 2.0"),
        ({"batch_size": None}, InvalidTypeError, "batch_size must be an integer, not None"),
        ({"rank": 2}, InvalidInputError, "rank 2 is not below world_size 2"),
        ({"rank": -1}, InvalidInputError, "rank is -1; it must be in 0"),
        ({"rank": 0.0}, InvalidTypeError, "rank must be an integer"),
        ({"world_size": 0}, InvalidInputError, "world_size is 0; it must be in 1"),
        ({"world_size": np.True_}, InvalidTypeError, "world_size must be an integer"),
        ({"seed": -1}, InvalidInputError, "seed is -1; it must be in 0 … 4294967295"),
        ({"seed": 2**32}, InvalidInputError, "seed is 4294967296; it must be in 0 … 4294967295"),
        ({"seed": None}, InvalidTypeError, "seed must be an integer"),
        ({"epoch": -1}, InvalidInputError, "epoch is -1; it must be in 0"),
        ({"epoch": "1"}, InvalidTypeError, "epoch must be an integer"),
        ({"shuffle": 1}, InvalidTypeError, "shuffle must be True or False"),
        ({"drop_last": None}, InvalidTypeError, "drop_last must be True or False"),
        ({"group_by_longest": 0}, InvalidTypeError, "group_by_longest must be True or False"),
        ({"group_by_longest": True, "shuffle": False}, InvalidInputError, "needs shuffle=True"),
        ({"batch_size": 10**19}, InvalidInputError, "batch_size is 10000000000000000000; it must be in 1"),
        (
            {"batch_size": 10**5000},
            InvalidInputError,
            "batch_size is an integer of 16610 bits; it must be in 1",
        ),
        ({"world_size": 10**19}, InvalidInputError, "world_size is 10000000000000000000; it must be in 1"),
        ({"batch_size": 2**13, "world_size": 2**12}, InvalidInputError, "= 33554432 packs a step"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        td.PackedBatchSampler(plan_of(4), **({"batch_size": 2, "rank": 1, "world_size": 2} | given))


def test_something_else_than_a_plan_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="plan is a list: give a PackPlan"):
        td.PackedBatchSampler([0, 1], 2)  # type: ignore[arg-type]


def test_numpy_integers_are_integers() -> None:
    sampler = td.PackedBatchSampler(plan_of(4), np.int64(2), np.int32(0), np.uint8(1), np.uint32(3))
    assert json.loads(json.dumps(sampler.state_dict())) == sampler.state_dict()
    for epoch in (-1, True, 1.0):
        with pytest.raises((InvalidInputError, InvalidTypeError), match="epoch"):
            sampler.set_epoch(epoch)  # type: ignore[arg-type]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("group_by_longest", [True, False])
def test_an_empty_plan_gives_no_steps(drop_last: bool, group_by_longest: bool) -> None:
    plan = td.pack([], 4)
    sampler = td.PackedBatchSampler(plan, 2, drop_last=drop_last, group_by_longest=group_by_longest)
    assert (len(sampler), list(sampler)) == (0, [])
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler) == []


def test_fewer_packs_than_a_global_batch() -> None:
    batches = global_batches(samplers_of(plan_of(3), 8, 4))
    assert sorted(Counter(batches[0]).values()) == [2, 3, 3]
    assert global_batches(samplers_of(plan_of(3), 8, 4, drop_last=True)) == []


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    names = ("RANK", "WORLD_SIZE")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def test_ranks_come_from_the_environment() -> None:
    plan = plan_of(8)
    with environment():
        sampler = td.PackedBatchSampler(plan, 2)
        assert (sampler.rank, sampler.world_size) == (0, 1)
    with environment(RANK="2", WORLD_SIZE="4"):
        sampler = td.PackedBatchSampler(plan, 2)
        assert (sampler.rank, sampler.world_size) == (2, 4)
        sampler = td.PackedBatchSampler(plan, 2, rank=0, world_size=1)
        assert (sampler.rank, sampler.world_size) == (0, 1)
        with pytest.raises(InvalidInputError, match="rank is 3 and world_size is None: give both"):
            td.PackedBatchSampler(plan, 2, rank=3)
        with pytest.raises(InvalidInputError, match="rank is None and world_size is 4: give both"):
            td.PackedBatchSampler(plan, 2, world_size=4)
    with environment(), pytest.raises(InvalidInputError, match="rank is 0 and world_size is None"):
        td.PackedBatchSampler(plan, 2, rank=0)
    for variables in ({"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "a", "WORLD_SIZE": "2"}):
        with environment(**variables), pytest.raises(InvalidInputError, match="environment has RANK="):
            td.PackedBatchSampler(plan, 2)
    with environment(RANK="4", WORLD_SIZE="4"), pytest.raises(InvalidInputError, match="rank 4 is not below"):
        td.PackedBatchSampler(plan, 2)


def report_ranks(rank: int, rendezvous: str, answers: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    # The group's rank counts, not the one that a launcher left in the environment.
    os.environ.update(RANK="7", WORLD_SIZE="9")
    sampler = td.PackedBatchSampler(plan_of(8), 2, seed=1)
    answers.put((rank, sampler.rank, sampler.world_size, list(sampler)))
    torch.distributed.destroy_process_group()


def test_ranks_come_from_the_process_group(tmp_path: Path) -> None:
    preload()
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    processes = [
        context.Process(target=report_ranks, args=(rank, str(tmp_path / "rendezvous"), answers))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    assert [answer[:3] for answer in found] == [(0, 0, 2), (1, 1, 2)]
    assert sorted(pack for answer in found for batch in answer[3] for pack in batch) == list(range(8))


def test_needs_no_torch() -> None:
    program = (
        "import sys, numpy, tundish as td\n"
        "sampler = td.PackedBatchSampler(td.pack(numpy.ones(9, int), 2), 2, group_by_longest=True)\n"
        "assert len(list(sampler)) == len(sampler) == 2 and sampler.state_dict()['step'] == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


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


MIXED_PLANS = [plan_of(50), plan_of(70)]
MIX = td.mix(MIXED_PLANS, [2, 1], num_packs=90, seed=4)


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
    for number, plan in enumerate(MIXED_PLANS):
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
    other = td.mix(MIXED_PLANS, [2, 1], num_packs=90, seed=5)
    for mix, steps, message in (
        (MIX, 8, r"after 8 steps of 6 packs, .* resumed after 42 packs: resume it with after=48"),
        (MIX, 15, "resume it with after=90"),
        (other, 3, "saved with another plan"),
        (changed.resume(weights=[1, 1], after=60), 3, "saved with another plan"),
    ):
        with pytest.raises(StateMismatchError, match=message):
            sampler.load_state_dict(stopped_after(mix, steps)[1])
    plan_state = td.PackedBatchSampler(MIXED_PLANS[0], 6, 0, 1, shuffle=False).state_dict()
    for state in (plan_state, before | {"plan": 3}, before | {"plan": ["x"]}):
        with pytest.raises(StateMismatchError):
            sampler.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="global batch of 4"):
        sampler.load_state_dict(td.PackedBatchSampler(MIX, 4, 0, 1).state_dict())
    assert sampler.state_dict() == before


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_state_under_a_loader_that_draws_ahead_needs_the_steps_that_were_done(context: str) -> None:
    sampler = td.PackedBatchSampler(plan_of(40), 2, 0, 1)
    loader: Any = DataLoader(range(40), batch_sampler=sampler, num_workers=1, multiprocessing_context=context)
    assert sampler.state_dict()["step"] == 0
    batches = iter(loader)
    next(batches)
    with pytest.raises(InvalidInputError, match=r"1 worker draws batches ahead.*steps_done=.*td\.loader"):
        sampler.state_dict()
    assert sampler.state_dict(steps_done=1)["step"] == 1
    list(batches)
    with pytest.raises(InvalidInputError, match="steps_done="):
        sampler.state_dict()
    # Another epoch, or another loader, which draws when it is asked.
    sampler.set_epoch(1)
    assert sampler.state_dict()["step"] == 0
    next(iter(DataLoader(range(40), batch_sampler=sampler)))
    assert sampler.state_dict()["step"] == 1


def test_a_loader_that_accelerate_prepared_draws_one_batch_ahead() -> None:
    sampler = td.PackedBatchSampler(plan_of(40), 2, 0, 1)
    loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(range(40), batch_sampler=sampler))
    next(iter(loader))
    with pytest.raises(InvalidInputError, match="Accelerate prepared draws batches ahead"):
        sampler.state_dict()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_takes_the_state_at_each_draw(workers: int) -> None:
    def make() -> Any:
        sampler = td.PackedBatchSampler(plan_of(40), 2, 0, 1)
        return StatefulDataLoader(range(40), batch_sampler=sampler, num_workers=workers)

    expected = [batch.tolist() for batch in make()]
    loader = make()
    given = [batch.tolist() for batch in islice(loader, 7)]
    again = make()
    again.load_state_dict(loader.state_dict())
    assert given + [batch.tolist() for batch in again] == expected
