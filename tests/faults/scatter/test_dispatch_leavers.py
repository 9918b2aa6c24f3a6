"""Ranks that leave a loop over a loader in rare moments, brought about here: before they are in it, and several.

Whoever goes on gets the rounds that all have gone through, and then a `PeerStoppedError`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import PATIENCE, Job, Line, on_nodes, outcome

import tundish as td
from tundish.scatter.loader.bounded_queue import BoundedQueue
from tundish.scatter.loader.epoch import SourcePass

# The promise: whoever leaves is known within so many seconds.
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


def interrupt_the_wait(before: float) -> None:
    """Ctrl-C comes when a pass is asked for, while the one before is waited for, so many seconds from then on."""
    from tundish.scatter.loader.prefetch import _Ending

    join = _Ending.join

    def joining(rounds: Any, seconds: float) -> bool:
        _Ending.join = join  # type: ignore[method-assign]
        if before:
            signal.setitimer(signal.ITIMER_REAL, before)
        else:
            os.kill(os.getpid(), signal.SIGINT)
        return join(rounds, seconds)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    _Ending.join = joining  # type: ignore[method-assign]


def interrupted_between_passes(rank: int, line: Line) -> None:
    node, prefetch, victim = line.hear()
    on_nodes(rank, node)
    with td.DispatchLoader(Numbered(10_000) if rank == 0 else None, prefetch=prefetch) as loader:
        for came, mine in enumerate(loader):
            check(rank, came, mine)
            if came == 2:
                break
        state = loader.state_dict()
        dist.barrier()
        if rank == victim:
            interrupt_the_wait(0.0)
        line.say(*go_through(rank, loader))
        if rank == victim:
            # Nothing was handed out of the pass that it did not come into.
            assert loader.state_dict() == state
        # All are in step again.
        for came, mine in zip(range(5), loader, strict=False):
            check(rank, came, mine)
        dist.barrier()


@pytest.mark.parametrize(("node", "prefetch"), [(3, 0), (3, 2), (1, 1)])
@pytest.mark.parametrize("victim", [0, 2])
def test_ctrl_c_before_a_rank_is_in_a_pass_is_known_to_those_who_are(
    node: int, prefetch: int, victim: int, tmp_path: Path
) -> None:
    with Job(interrupted_between_passes, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, (node, prefetch, victim))
        told = job.hear_all()
        kind, _, interrupted = told[victim]
        assert kind == "KeyboardInterrupt"
        for rank in range(3):
            kind, lost, at = told[rank]
            if rank != victim:
                assert (kind, lost) == ("PeerStoppedError", victim)
                assert at - interrupted < KNOWN
        job.expect_end()


def interrupted_while_others_are_behind(rank: int, line: Line) -> None:
    # Whose loader is read when it is asked for a round hears then that somebody has left.
    with td.DispatchLoader(Numbered(10_000) if rank == 0 else None, prefetch=0) as loader:
        rounds = iter(loader)
        check(rank, 0, next(rounds))
        if rank == 1:
            del rounds
            interrupt_the_wait(0.5)
            line.say(*go_through(rank, loader))
            # Also where the pass that it did not come into is yet to be passed over.
            line.hear()
        else:
            line.hear()
            assert outcome(lambda: list(rounds))[::2] == ("PeerStoppedError", 1)
            line.say(*go_through(rank, loader))
        for came, mine in zip(range(5), loader, strict=False):
            check(rank, came, mine)
        dist.barrier()


def test_ctrl_c_while_the_others_are_in_the_pass_before_is_known_to_them_in_the_next(tmp_path: Path) -> None:
    with Job(interrupted_while_others_are_behind, 2, tmp_path) as job:
        assert job.hear(1)[0] == "KeyboardInterrupt"
        told = time.monotonic()
        job.tell(0)
        kind, lost, at = job.hear(0)
        assert (kind, lost) == ("PeerStoppedError", 1)
        assert at - told < 2 * KNOWN
        job.tell(1)
        job.expect_end()


def obeying(rank: int, line: Line) -> None:
    """Takes so many rounds, leaves ("leave"), or goes through what is left ("rest"), as the test says.

    Who has taken some waits for more. A tuple of a number: waits until no more rounds than that are left to be taken.
    """
    rounds = line.hear()
    with td.DispatchLoader(Numbered(rounds) if rank == 0 else None, prefetch=8) as loader:
        batches: Any = iter(loader)
        came = 0

        def take(most: int) -> None:
            nonlocal came
            for _, mine in zip(range(most), batches, strict=False):
                check(rank, came, mine)
                came += 1

        def wait_for(is_so: Callable[[int], bool]) -> None:
            deadline = time.monotonic() + PATIENCE
            while not is_so(loader.stats()["ready_rounds"]) and time.monotonic() < deadline:
                time.sleep(0.01)

        while (wanted := line.hear()) is not None:
            kind, lost = "", None
            if wanted == "leave":
                batches = None
            elif isinstance(wanted, tuple):
                wait_for(lambda ready, wanted=wanted: ready <= wanted[0])  # type: ignore[misc]
            else:
                kind, _, lost = outcome(lambda wanted=wanted: take(100 if wanted == "rest" else wanted))  # type: ignore[misc]
                if wanted != "rest":
                    wait_for(lambda ready: came + ready > ALL_LEFT_BY)
            line.say(came, kind, lost)
        for came, mine in zip(range(3), loader, strict=False):
            check(rank, came, mine)
        dist.barrier()


# After more rounds nobody leaves before the end.
ALL_LEFT_BY = 6

# Rounds of the data, what is done by whom and in which order, and then by whom all of them stopped for those who go on.
PLANS: dict[str, tuple[int, list[tuple[int, Any]], int]] = {
    "the one with fewer rounds is the second to say so": (
        50,
        [(0, 2), (3, 2), (1, 6), (2, 3), (1, "leave"), (2, "leave")],
        2,
    ),
    "he is known only when all were told of the first": (
        50,
        [(0, 2), (3, 2), (1, 6), (2, 3), (1, "leave"), (2, "wait"), (2, "leave")],
        2,
    ),
    "the first has left nothing out": (
        8,
        [(0, 2), (3, 2), (1, 8), (2, 3), (1, "leave"), (1, "wait"), (2, "leave")],
        2,
    ),
    "the data was at its end already": (
        8,
        [(3, 2), (1, 8), (2, 3), (0, "rest"), (2, "wait"), (2, "leave")],
        2,
    ),
    "it is the source that has fewer rounds": (
        50,
        [(0, 3), (3, 2), (2, 5), (1, 6), (1, "leave"), (1, "wait"), (0, "leave")],
        0,
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_whoever_goes_on_is_told_of_the_leaver_with_the_fewest_rounds(plan: str, tmp_path: Path) -> None:
    rounds, steps, stopped_by = PLANS[plan]
    came = dict.fromkeys(range(4), 0)
    with Job(obeying, 4, tmp_path) as job:
        for rank in range(4):
            job.tell(rank, rounds)
        for rank, wanted in steps:
            if wanted == "wait":
                # Whichever comes first: all end alike.
                time.sleep(KNOWN / 2)
                continue
            job.tell(rank, wanted)
            came[rank], kind, _ = job.hear(rank)
            assert not kind
        left = {rank for rank, wanted in steps if wanted == "leave"}
        fewest = came[stopped_by]
        for rank in {0, 1, 2, 3} - left:
            # A step in which they hear of it.
            job.tell(rank, (max(fewest - came[rank], 0),))
            job.hear(rank)
            job.tell(rank, "rest")
            found = job.hear(rank)
            if came[rank] == rounds:
                # Through when the other one left.
                assert found == (rounds, "", None), rank
            else:
                assert found == (max(fewest, came[rank]), "PeerStoppedError", stopped_by), rank
        for rank in range(4):
            job.tell(rank, None)
        job.expect_end()


def leaving_as_a_round_begins(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    has_departed = threading.Event()
    step, depart = SourcePass.step, SourcePass.depart

    def late_step(self: SourcePass) -> Any:
        if self._rounds == 2:
            assert has_departed.wait(PATIENCE)
        return step(self)

    def slow_depart(self: SourcePass, rounds: int) -> None:
        depart(self, rounds)
        has_departed.set()
        # Longer than whoever makes the rounds takes to see it.
        time.sleep(0.3)

    with pytest.MonkeyPatch.context() as patch, td.DispatchLoader(range(10) if rank == 0 else None) as loader:
        patch.setattr(SourcePass, "step", late_step)
        patch.setattr(SourcePass, "depart", slow_depart)
        batches = iter(loader)
        assert [next(batches), next(batches)] == [rank, 2 + rank]
        if rank == 0:
            del batches
        else:
            line.say(*outcome(lambda: next(batches)))
        line.hear()
        assert list(loader) == list(range(rank, 10, 2))


@pytest.mark.parametrize("node", [2, 1])
def test_a_source_that_leaves_as_it_begins_a_round_does_not_end_the_data(node: int, tmp_path: Path) -> None:
    with Job(leaving_as_a_round_begins, 2, tmp_path) as job:
        job.tell(0, node)
        job.tell(1, node)
        kind, text, leaver = job.hear(1)
        assert (kind, leaver) == ("PeerStoppedError", 0), text
        job.tell(0)
        job.tell(1)
        job.expect_end()


def leaving_after_the_last_round(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    wait_for_end = BoundedQueue.wait_for_end

    def slow_wait(self: BoundedQueue[Any], seconds: float) -> bool:
        found = wait_for_end(self, seconds)
        # As long as whoever took the last one needs to leave.
        time.sleep(0.3 * found)
        return found

    with pytest.MonkeyPatch.context() as patch, td.DispatchLoader(range(6) if rank == 0 else None) as loader:
        if rank == 0:
            patch.setattr(BoundedQueue, "wait_for_end", slow_wait)
        batches = iter(loader)
        came = [next(batches) for _ in range(3)]
        if rank == 0:
            # Whoever makes the rounds has seen that there are no more.
            assert loader._pass is not None
            while loader._pass._rounds_in_all is None:
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
def test_whoever_leaves_after_the_last_round_has_left_nothing_out_where_the_length_is_known(
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
