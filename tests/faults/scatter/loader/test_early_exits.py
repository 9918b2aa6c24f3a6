"""Ranks that leave a loop over a loader in rare moments, brought about here: before they are in it, and several.

Anyone who goes on gets the rounds that all have gone through, and then a `PeerStoppedError`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome

import tundish as td
from tundish.scatter.loader.bounded_queue import BoundedQueue

# The promise: anyone who leaves is known within so many seconds.
KNOWN = 1.0


class Numbered:
    """Epochs of so many rounds, batches told by their numbers."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([number]) for number in range(self.rounds * dist.get_world_size()))


def check(rank: int, came: int, mine: torch.Tensor) -> None:
    assert mine.tolist() == [came * dist.get_world_size() + rank]


def go_through(rank: int, loader: td.DispatchLoader[Any]) -> tuple[str, Any, float]:
    """A pass to its end: the kind of what ended it, whom that names, and when."""

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
        for rank in range(3):
            job.tell(rank, (node, prefetch, victim))
        told = job.hear_all()
        kind, _, interrupted = told[victim]
        assert kind == "KeyboardInterrupt"
        for rank in range(3):
            kind, lost, at = told[rank]
            if rank != victim:
                assert (kind, lost) == ("PeerFailedError", victim)
                assert at - interrupted < KNOWN
            job.tell(rank)
        job.expect_end()


def leaving_after_the_last_round(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    wait_until_empty = BoundedQueue.wait_until_empty

    def slow_wait(self: BoundedQueue[Any], seconds: float) -> bool:
        found = wait_until_empty(self, seconds)
        # As long as anyone who took the last one needs to leave.
        time.sleep(0.3 * found)
        return found

    with pytest.MonkeyPatch.context() as patch, td.DispatchLoader(range(6) if rank == 0 else None) as loader:
        if rank == 0:
            patch.setattr(BoundedQueue, "wait_until_empty", slow_wait)
        batches = iter(loader)
        came = [next(batches) for _ in range(3)]
        if rank == 0:
            # Anyone who makes the rounds has seen that there are no more.
            assert loader._epoch is not None
            while not loader._epoch._is_end_read:  # type: ignore[attr-defined]
                time.sleep(0.01)
            del batches
            line.say("", came)
        else:
            kind, _, _ = outcome(lambda: next(batches))
            line.say(kind, came)
        line.hear()


@pytest.mark.parametrize("node", [2, 1])
def test_a_source_that_leaves_when_it_knows_that_all_was_read_ends_the_data(
    node: int, tmp_path: Path
) -> None:
    with Job(leaving_after_the_last_round, 2, tmp_path) as job:
        job.tell(0, node)
        job.tell(1, node)
        assert job.hear_all() == [("", [0, 2, 4]), ("StopIteration", [1, 3, 5])]
        job.tell(0)
        job.tell(1)
        job.expect_end()


class Sized(Numbered):
    """The same, where one knows how many batches there are."""

    def __len__(self) -> int:
        return self.rounds * dist.get_world_size()


def leaving_before_the_end_is_read(rank: int, line: Line) -> None:
    node, leaver, is_sized = line.hear()
    on_nodes(rank, node)
    data = (Sized if is_sized else Numbered)(3)
    # Then the end is read when a round after the last one is asked for.
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
def test_anyone_who_leaves_after_the_last_round_has_left_nothing_out_where_the_length_is_known(
    is_sized: bool, leaver: int, node: int, tmp_path: Path
) -> None:
    with Job(leaving_before_the_end_is_read, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, (node, leaver, is_sized))
        assert job.hear(leaver) == ("left",)
        # As long as it takes to be known everywhere.
        time.sleep(KNOWN / 2)
        others = [rank for rank in range(3) if rank != leaver]
        for rank in others:
            job.tell(rank)
        for kind, text, whom in job.hear_all(*others):
            expected = ("StopIteration", None) if is_sized else ("PeerStoppedError", leaver)
            assert (kind, whom) == expected, text
        job.expect_end()


class Broken:
    """Raises one and the same error in each pass."""

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
            line.say(kind, "the shard is damaged" in text, time.monotonic() - begun < KNOWN)
            line.hear()


@pytest.mark.parametrize("node", [2, 1])
def test_an_error_that_comes_again_is_told_again(node: int, tmp_path: Path) -> None:
    with Job(failing_alike, 2, tmp_path) as job:
        job.tell(0, node)
        job.tell(1, node)
        for _ in range(3):
            assert job.hear_all() == [("OSError", True, True), ("PeerFailedError", True, True)]
            job.tell(0)
            job.tell(1)
        job.expect_end()
