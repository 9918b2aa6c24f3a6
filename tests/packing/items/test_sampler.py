"""`PackedBatchSampler`: partition, order and equal steps, against the words of its documentation."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.distributed.rank_processes import preload
from support.packing.samplers import global_batches, options, plan_of, samplers_of, splits

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError


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
