"""Steps of every kind in random order. Ranks keep some of their batches.

Each rank gets in each step the batch of that step or its error, and batches that are kept do not change. The seeds are
fixed; `make soak` runs more and longer cases.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Line, on_nodes, run_job
from support.scatter.batches import same
from support.soak import IS_SOAK

import tundish as td

WORLD = 3
SEEDS, STEPS = (20, 400) if IS_SOAK else (2, 60)


def large(number: int, rank: int) -> Any:
    return {"x": torch.full((40_000,), 10 * number + rank, dtype=torch.int32), "of": (1, None)}


def with_values(number: int, rank: int) -> Any:
    return {**large(number, rank), "number": number, "text": "x" * (200 * number)}


def many(number: int, rank: int) -> Any:
    return [torch.full((3,), 10 * number + rank, dtype=torch.int32) for _ in range(70)]


def past_the_caches(number: int, rank: int) -> Any:
    return {"x": torch.full((2_300_000,), 10 * number + rank, dtype=torch.int32)}


def of_changing_size(number: int, rank: int) -> Any:
    return [torch.full((50_000 + number % 3,), 10 * number + rank, dtype=torch.int32)]


def small(number: int, rank: int) -> Any:
    return {"x": torch.tensor(10 * number + rank)}


def without_tensors(number: int, rank: int) -> Any:
    return {"number": 10 * number + rank}


# Some come more often.
STRUCTURES = [
    large,
    large,
    large,
    many,
    many,
    with_values,
    past_the_caches,
    of_changing_size,
    small,
    without_tensors,
]


class StepCase(NamedTuple):
    """One step, which all ranks know beforehand.

    Attributes:
        make: makes a batch by its number and rank.
        absent: ranks that get nothing.
        is_shared: whether all ranks get the same batch.
        fails: what is wrong with the source's batches.
        has_barrier: whether a barrier comes before it.
        pauses: by rank, seconds before it.
    """

    make: Any
    absent: frozenset[int]
    is_shared: bool
    fails: str
    has_barrier: bool
    pauses: dict[int, float]

    def batch(self, number: int, rank: int) -> Any:
        return None if rank in self.absent else self.make(number, 0 if self.is_shared else rank)

    def given(self, number: int) -> Any:
        if self.fails == "a wrong count":
            return [None]
        if self.fails == "an iteration":
            return (1 / 0 for _ in range(WORLD))
        batches = [self.batch(number, rank) for rank in range(WORLD)]
        if self.is_shared:
            batches = [batches[0]] * WORLD
        if self.fails == "a batch":
            batches[2] = [threading.Lock(), batches[2]]
        return batches


def random_steps(seed: int) -> list[StepCase]:
    draw = random.Random(seed)
    make, steps = STRUCTURES[0], list[StepCase]()
    for _ in range(STEPS):
        if draw.random() < 0.25:
            make = draw.choice(STRUCTURES)
        kind = draw.choices(
            ["a batch each", "some", "none", "one for all", "a wrong count", "an iteration", "a batch"],
            [80, 6, 2, 4, 2, 2, 4],
        )[0]
        some = {rank for rank in range(WORLD) if draw.random() < 0.6} if kind == "some" else set()
        one = StepCase(
            make,
            frozenset(range(WORLD) if kind == "none" else some),
            is_shared=kind == "one for all",
            fails=kind if kind in ("a wrong count", "an iteration", "a batch") else "",
            has_barrier=draw.random() < 0.1,
            pauses={rank: 0.02 * draw.random() for rank in range(WORLD) if draw.random() < 0.1},
        )
        steps.append(one)
    return steps


def all_steps(rank: int, line: Line) -> None:
    import tundish.scatter.transport.gloo as gloo
    import tundish.scatter.transport.shared_memory as shared_memory

    seed, node = line.hear()
    on_nodes(rank, node)
    # Most batches that are kept are copies.
    shared_memory.MAX_LEASES = gloo.MAX_LEASES = 8  # type: ignore[misc]
    kept: list[tuple[int, Any, Any]] = []
    draw = random.Random(rank)
    for number, case in enumerate(random_steps(seed)):
        time.sleep(case.pauses.get(rank, 0.0))
        if case.has_barrier:
            dist.barrier()
        given = case.given(number) if rank == 0 else None
        try:
            mine = td.scatter_batch(given)
        except Exception as error:
            if not case.fails:
                raise AssertionError((number, case)) from error
            continue
        assert not case.fails, (number, case)
        expected = case.batch(number, rank)
        assert same(mine, expected), (number, case, mine)
        kept.append((number, mine, expected))
        while len(kept) > 30:
            at, mine, expected = kept.pop(draw.randrange(len(kept)))
            assert same(mine, expected), (number, at)
    for at, mine, expected in kept:
        assert same(mine, expected), at
    dist.barrier()


@pytest.mark.parametrize("node", [3, 2, 1], ids=["one node", "two nodes", "a node each"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_steps_of_every_kind_arrive_unchanged(seed: int, node: int, tmp_path: Path) -> None:
    run_job(all_steps, WORLD, tmp_path, (seed, node), seconds=20.0)
