"""Loaders that are not closed: ranks end without an error and leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.programs import run_ranks
from support.distributed.rank_processes import Job, Line, on_nodes, outcome
from support.shm.private_shm import private_shm
from support.waiting import PATIENCE

import tundish as td

UNCLOSED = """
import sys, torch, torch.distributed as dist, tundish as td

dist.init_process_group("gloo")
rank = dist.get_rank()


def loader(steps, **options):
    given = [{"x": torch.full((50_000,), number)} for number in range(2 * steps)]
    return td.DispatchLoader(given if rank == 0 else None, **options)


class Holder:
    pass


never_begun = loader(5)
through = loader(5)
assert [int(batch["x"][0]) for batch in through] == list(range(rank, 10, 2))
in_the_middle = loader(50, prefetch=3)
steps = iter(in_the_middle)
kept = [next(steps), next(steps)]
read_here = loader(50, prefetch=0)
steps_read_here = iter(read_here)
kept.append(next(steps_read_here))
in_a_cycle = Holder()
in_a_cycle.itself, in_a_cycle.steps = in_a_cycle, iter(loader(50))
next(in_a_cycle.steps)
del in_a_cycle
dropped = iter(loader(50))
next(dropped)
del dropped
dist.barrier()
if sys.argv[1] == "without the group":
    dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("how", ["with the group", "without the group"])
def test_ranks_that_do_not_close_their_loaders_end_and_leave_nothing(how: str) -> None:
    with private_shm(64 << 20) as folder:
        for ended in run_ranks(["-c", UNCLOSED, how]):
            assert (ended.returncode, ended.stdout) == (0, "done\n"), ended
            assert "Traceback" not in ended.stderr and "terminate" not in ended.stderr, ended
        assert [path.name for path in folder.iterdir()] == []


def threads() -> list[str]:
    """The threads of loaders, without the group's thread for votes."""
    ours = "tundish-dispatch", "tundish-scatter"
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)]


def dropped(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())

    def use(prefetch: int) -> Any:
        given = [{"x": torch.full((50_000,), number)} for number in range(100)]
        loader = td.DispatchLoader(given if rank == 0 else None, prefetch=prefetch)
        for came, mine in enumerate(loader):
            if came == 3:
                return mine
        return None

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    counts = []
    for number in range(12):
        use((0, 1, 3)[number % 3])
        # Each rank collects its loader before all make the next one.
        gc.collect()
        dist.barrier()
        deadline = time.monotonic() + PATIENCE / 4
        while (threads() or (counts and descriptors() > counts[0])) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threads() == [], (number, threads())
        # The first loaders open descriptors that stay.
        if number >= 3:
            counts.append(descriptors())
    assert max(counts) == counts[0], counts
    line.say("done")
    line.hear()


@pytest.mark.parametrize("node", [2, 1])
def test_loaders_that_are_dropped_free_their_threads_and_descriptors(node: int, tmp_path: Path) -> None:
    with Job(dropped, 2, tmp_path) as job:
        job.tell_all(node)
        assert job.hear_all() == [("done",)] * 2
        job.tell_all()
        job.expect_end()


def garbage(rank: int, line: Line) -> None:
    prefetch = line.hear()
    given = [torch.full((2,), number) for number in range(1000)]
    loader = td.DispatchLoader(given if rank == 0 else None, prefetch=prefetch)
    steps = iter(loader)
    next(steps)
    if rank == 0:
        cycle: list[Any] = [loader, steps]
        cycle.append(cycle)
        del cycle, loader, steps
        gc.collect()
        line.say("collected")
    else:
        line.say(outcome(lambda: [time.sleep(0.01) for _ in steps])[0])
    line.hear()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loader_that_is_collected_with_its_iterator_has_left_the_loop(
    prefetch: int, tmp_path: Path
) -> None:
    with Job(garbage, 2, tmp_path) as job:
        job.tell_all(prefetch)
        assert job.hear_all() == [("collected",), ("PeerLeftLoopError",)]
        job.tell_all()
        job.expect_end()
