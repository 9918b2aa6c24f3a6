"""Ranks in a loop over a loader are killed or interrupted at random moments.

Every batch is the right one, the others hear of it in time, and after Ctrl-C the same loader works again. The seed is
fixed; `make soak` has 200 cases.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes
from support.soak import IS_SOAK
from support.waiting import NOTICED

import tundish as td

ENDINGS = 200 if IS_SOAK else 8
# Values of a small batch, of a larger one, and of one that is written past the caches.
SIZES = (100, 100_000, 1_200_000)


class Endless:
    """Batches that hold their numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        number = 0
        while True:
            yield torch.full((SIZES[number // dist.get_world_size() % 3],), number)
            number += 1


def check(rank: int, came: int, mine: torch.Tensor) -> None:
    assert len(mine) == SIZES[came % 3] and bool((mine == came * dist.get_world_size() + rank).all())


def in_the_loop(rank: int, line: Line) -> None:
    node, prefetch = line.hear()
    on_nodes(rank, node)
    with td.DispatchLoader(Endless() if rank == 0 else None, prefetch=prefetch) as loader:
        for mine in loader:
            check(rank, 0, mine)
            break
        dist.barrier()

        def begun() -> Iterator[torch.Tensor]:
            iterator = iter(loader)
            line.say("begun")
            # While the iterator lives, the rank has not left.
            return iterator

        try:
            for came, mine in enumerate(begun()):
                check(rank, came, mine)
        except KeyboardInterrupt:
            line.say(rank, time.monotonic())
        except (td.errors.PeerFailedError, td.errors.PeerLeftLoopError) as error:
            line.say(error.rank, time.monotonic())
        if line.hear():
            for came, mine in zip(range(5), loader, strict=False):
                check(rank, came, mine)
        dist_is_whole = line.hear()
    if not dist_is_whole:
        # Without the group's teardown, which would wait for the killed rank.
        os._exit(0)


def cases() -> list[Any]:
    draw = random.Random(20)
    return [
        (
            draw.choice([1, 2, 3]),
            draw.choice([0, 1, 3]),
            draw.randrange(3),
            bool(number % 2),
            draw.uniform(0, 0.3),
        )
        for number in range(ENDINGS)
    ]


@pytest.mark.parametrize(("node", "prefetch", "victim", "is_killed", "seconds"), cases())
def test_a_rank_that_ends_at_any_moment_is_named_by_the_others(
    node: int, prefetch: int, victim: int, is_killed: bool, seconds: float, tmp_path: Path
) -> None:
    with Job(in_the_loop, 3, tmp_path) as job:
        others = [rank for rank in range(3) if rank != victim]
        job.tell_all((node, prefetch))
        assert job.hear_all() == [("begun",)] * 3
        time.sleep(seconds)
        begin = time.monotonic()
        job.signal(victim, signal.SIGKILL if is_killed else signal.SIGINT)
        left = others if is_killed else [0, 1, 2]
        for ended, at in job.hear_all(*left):
            assert ended == victim
            assert at - begin < NOTICED
        # Without prefetch, a source that is interrupted while it sends closes the loader.
        goes_on = not is_killed and (victim > 0 or prefetch > 0)
        job.tell_all(goes_on, left)
        job.tell_all(not is_killed, left)
        if is_killed:
            assert [job.exit_code(rank) for rank in others] == [0, 0]
        else:
            job.expect_end()
