"""Ranks that leave a loop at rare moments: as it begins, as it ends, and while the end is read.

The other ranks get the steps that all ranks had, and then a `PeerLeftLoopError`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome
from support.waiting import NOTICED, PATIENCE

import tundish as td


class Numbered:
    """Epochs of so many steps. The batches hold their numbers."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([number]) for number in range(self.steps * dist.get_world_size()))


# Seconds in which all ranks hear of it.
HEARD = 1.0


def check(rank: int, came: int, mine: torch.Tensor) -> None:
    assert mine.tolist() == [came * dist.get_world_size() + rank]


def go_through(rank: int, loader: td.DispatchLoader[Any]) -> tuple[str, Any, float]:
    """Iterate to the end. Returns the kind of the error, the rank that it names, and its time."""

    def loop() -> None:
        for came, mine in enumerate(loader):
            check(rank, came, mine)

    kind, _, lost = outcome(loop)
    return kind, lost, time.monotonic()


def interrupted_before_a_loop(rank: int, line: Line) -> None:
    node, prefetch, victim = line.hear()
    on_nodes(rank, node)
    with td.DispatchLoader(Numbered(10_000) if rank == 0 else None, prefetch=prefetch) as loader:
        for came, mine in enumerate(loader):
            check(rank, came, mine)
            if came == 2:
                break
        dist.barrier()
        if rank == victim:
            end_iteration = td.DispatchLoader._end_iteration

            def interrupted(self: td.DispatchLoader[Any]) -> None:
                end_iteration(self)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(td.DispatchLoader, "_end_iteration", interrupted)
                line.say(*go_through(rank, loader))
            assert outcome(lambda: iter(loader))[1].startswith("this DispatchLoader is closed")
        else:
            line.say(*go_through(rank, loader))
        line.hear()


@pytest.mark.parametrize(("node", "prefetch"), [(3, 0), (3, 2), (1, 1)])
@pytest.mark.parametrize("victim", [0, 2])
def test_ctrl_c_as_a_loop_begins_closes_the_loader_and_is_known_to_all(
    node: int, prefetch: int, victim: int, tmp_path: Path
) -> None:
    with Job(interrupted_before_a_loop, 3, tmp_path) as job:
        job.tell_all((node, prefetch, victim))
        told = job.hear_all()
        kind, _, interrupted = told[victim]
        assert kind == "KeyboardInterrupt"
        for rank in range(3):
            kind, lost, at = told[rank]
            if rank != victim:
                assert (kind, lost) == ("PeerFailedError", victim)
                assert at - interrupted < NOTICED
            job.tell(rank)
        job.expect_end()


def leaving_after_the_last_step(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    all_were_read, has_left = threading.Event(), threading.Event()

    def numbers() -> Iterator[int]:
        yield from range(6)
        all_were_read.set()
        # The source's caller leaves before the loader knows of the end.
        assert has_left.wait(PATIENCE)

    with td.DispatchLoader(numbers() if rank == 0 else None) as loader:
        batches = iter(loader)
        came = [next(batches) for _ in range(3)]
        if rank == 0:
            assert all_were_read.wait(PATIENCE)
            del batches
            has_left.set()
            line.say("", came)
        else:
            kind, _, _ = outcome(lambda: next(batches))
            line.say(kind, came)
        line.hear()


@pytest.mark.parametrize("node", [2, 1])
def test_a_source_that_leaves_while_the_end_is_read_ends_the_data(node: int, tmp_path: Path) -> None:
    with Job(leaving_after_the_last_step, 2, tmp_path) as job:
        job.tell_all(node)
        assert job.hear_all() == [("", [0, 2, 4]), ("StopIteration", [1, 3, 5])]
        job.tell_all()
        job.expect_end()


class Sized(Numbered):
    """The same with a length."""

    def __len__(self) -> int:
        return self.steps * dist.get_world_size()


def leaving_before_the_end_is_read(rank: int, line: Line) -> None:
    node, leaver, is_sized = line.hear()
    on_nodes(rank, node)
    data = (Sized if is_sized else Numbered)(3)
    # Without prefetch, the end is read when a step after the last one is asked for.
    with td.DispatchLoader(data if rank == 0 else None, prefetch=0) as loader:
        batches = iter(loader)
        for came in range(3):
            check(rank, came, next(batches))
        dist.barrier()
        if rank == leaver:
            del batches
            line.say("left")
        else:
            line.hear()
            line.say(*outcome(lambda: next(batches)))
        dist.barrier()
        for came, mine in enumerate(loader):
            check(rank, came, mine)
        assert came == 2


@pytest.mark.parametrize("node", [3, 1])
@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("is_sized", [True, False])
def test_a_rank_may_leave_after_the_last_step_where_the_length_is_known(
    is_sized: bool, leaver: int, node: int, tmp_path: Path
) -> None:
    with Job(leaving_before_the_end_is_read, 3, tmp_path) as job:
        job.tell_all((node, leaver, is_sized))
        assert job.hear(leaver) == ("left",)
        # Time in which all ranks hear of it.
        time.sleep(HEARD)
        others = [rank for rank in range(3) if rank != leaver]
        job.tell_all(None, others)
        for kind, text, whom in job.hear_all(*others):
            # A source that is asked for more finds the end; one that leaves does not look for it.
            expected = ("StopIteration", None) if is_sized or leaver else ("PeerLeftLoopError", 0)
            assert (kind, whom) == expected, text
        job.expect_end()


class Broken:
    """Raises the same error object in each iteration."""

    def __init__(self) -> None:
        self.error = OSError("the shard is damaged")

    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        raise self.error


def failing_alike(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    with td.DispatchLoader(Broken() if rank == 0 else None) as loader:
        for _ in range(3):
            begun = time.monotonic()
            kind, text, _ = outcome(lambda: list(loader))
            line.say(kind, "the shard is damaged" in text, time.monotonic() - begun < NOTICED)
            line.hear()


@pytest.mark.parametrize("node", [2, 1])
def test_an_error_that_is_raised_again_is_reported_again(node: int, tmp_path: Path) -> None:
    with Job(failing_alike, 2, tmp_path) as job:
        job.tell_all(node)
        for _ in range(3):
            assert job.hear_all() == [("OSError", True, True), ("PeerFailedError", True, True)]
            job.tell_all()
        job.expect_end()
