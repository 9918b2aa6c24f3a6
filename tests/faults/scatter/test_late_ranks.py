"""Scatters in which a rank is slow, stopped or interrupted: all ranks get an error in time that names it.

Times are taken on the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import builtins
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome
from support.interrupts import signal_once_waiting
from support.waiting import NOTICED

import tundish as td

# How many steps a source may be ahead of a rank of its node.
AHEAD = 4


def a_step(rank: int, number: int) -> None:
    given = [{"x": torch.full((1000,), number + other)} for other in range(dist.get_world_size())]
    mine = td.scatter_batch(given if rank == 0 else None)
    assert mine["x"].tolist() == [number + rank] * 1000


def stopped_receiver(rank: int, line: Line) -> None:
    a_step(rank, 0)
    line.say("ready")
    if rank == 0:
        line.hear()
    while not (found := outcome(lambda: a_step(rank, 1)) if rank == 0 else outcome(lambda: take(rank)))[0]:
        pass
    line.say(*found)


def take(rank: int) -> None:
    assert td.scatter_batch(None)["x"].tolist() == [1 + rank] * 1000


def test_a_stopped_receiver_is_named_by_all_after_the_timeout(tmp_path: Path) -> None:
    with Job(stopped_receiver, 4, tmp_path, seconds=2.0) as job:
        assert job.hear_all() == [("ready",)] * 4
        job.signal(1, signal.SIGSTOP)
        job.tell(0)
        kind, text, _ = job.hear(0)
        assert kind == "TimedOutError" and "rank 1 did not come within 2 s" in text, text
        for rank in (2, 3):
            kind, text, lost = job.hear(rank)
            assert (kind, lost) == ("PeerFailedError", 0) and "rank 1 did not come within 2 s" in text, text
        job.expect_end(0, 2, 3)


def failure_beside_a_slow_one(rank: int, line: Line) -> None:
    a_step(rank, 0)
    if rank == 1:
        line.say("busy")
        line.hear()
    for number in range(1, AHEAD + 1):
        a_step(rank, number)
    if rank == 0:
        line.hear()
    for number in range(2):
        kind, _, _ = outcome(lambda: td.scatter_batch([] if rank == 0 else None))
        line.say(kind, time.monotonic())
        if number == 0 and rank == 0:
            line.hear()
    a_step(rank, 9)


def test_an_error_of_the_source_arrives_although_a_rank_is_far_behind(tmp_path: Path) -> None:
    with Job(failure_beside_a_slow_one, 3, tmp_path) as job:
        assert job.hear(1) == ("busy",)
        begin = time.monotonic()
        job.tell(0)
        for rank, expected in ((0, "InvalidInputError"), (2, "PeerFailedError")):
            kind, at = job.hear(rank)
            assert kind == expected
            assert at - begin < NOTICED
        job.tell(0)
        assert job.hear(0)[0] == "InvalidInputError"
        job.tell(1)
        # The late rank hears of both errors in their steps.
        assert [job.hear(1)[0], job.hear(1)[0]] == ["PeerFailedError"] * 2
        assert job.hear(2)[0] == "PeerFailedError"
        job.expect_end()


def source_that_leaves(rank: int, line: Line) -> None:
    a_step(rank, 0)
    if rank == 1:
        line.hear()
    for number in range(1, AHEAD + 1):
        a_step(rank, number)
    if rank == 0:
        # The queue to rank 1, which has read nothing, is full.
        for _ in range(2):
            assert outcome(lambda: td.scatter_batch([]))[0] == "InvalidInputError"
        signal_once_waiting()
        assert outcome(lambda: td.scatter_batch([]))[0] == "KeyboardInterrupt"
        line.say("left")
    else:
        for _ in range(2):
            assert outcome(lambda: td.scatter_batch(None))[0] == "PeerFailedError"
        line.say("caught up")
        kind, text, lost = outcome(lambda: td.scatter_batch(None))
        assert (kind, lost) == ("PeerFailedError", 0), text
    line.hear()


def test_a_late_receiver_gets_the_steps_before_the_source_was_interrupted(tmp_path: Path) -> None:
    with Job(source_that_leaves, 2, tmp_path) as job:
        assert job.hear(0) == ("left",)
        job.tell(1)
        assert job.hear(1) == ("caught up",)
        job.tell_all()
        job.expect_end()


def silent_source(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    a_step(rank, 0)
    if rank == 1:
        for _ in range(2):
            kind, text, _ = outcome(lambda: td.scatter_batch(None))
            assert kind == "TimedOutError" and "rank 0 did not come within 2 s" in text, text
        line.say("gave up")
    else:
        line.hear()
        for number in (1, 2):
            a_step(0, number)
    a_step(rank, 3)


@pytest.mark.parametrize("node", [2, 1])
def test_a_source_is_named_after_the_timeout_and_may_come_then(node: int, tmp_path: Path) -> None:
    with Job(silent_source, 2, tmp_path, seconds=2.0) as job:
        job.tell_all(node)
        assert job.hear(1) == ("gave up",)
        job.tell(0)
        job.expect_end()


def slow_receiver(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    a_step(rank, 0)
    if rank == 0:
        kind, text, _ = outcome(lambda: a_step(0, 1))
        assert kind == "TimedOutError" and "rank 1 did not come within 2 s" in text, text
        line.say("gave up")
    elif rank == 1:
        line.hear()
    for number in (1, 2) if rank else (2,):
        a_step(rank, number)


@pytest.mark.parametrize("world", [2, 3])
def test_a_receiver_of_another_node_is_named_and_may_come_after_the_timeout(
    world: int, tmp_path: Path
) -> None:
    with Job(slow_receiver, world, tmp_path, seconds=2.0) as job:
        assert job.hear(0) == ("gave up",)
        job.tell(1)
        job.expect_end()


def news_before_the_timeout(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    a_step(rank, 0)
    if rank == 1:
        line.hear()
    elif rank == 0:
        line.say("giving")
        assert outcome(lambda: a_step(0, 1))[0] == "KeyboardInterrupt"
    if rank != 0:
        a_step(rank, 1)
        line.say("has its batch")
    kind, _, _ = outcome(lambda: td.scatter_batch([] if rank == 0 else None))
    line.say(kind)
    line.hear()


def test_an_error_of_the_source_does_not_wait_for_a_late_rank(tmp_path: Path) -> None:
    with Job(news_before_the_timeout, 3, tmp_path) as job:
        assert job.hear(0) == ("giving",)
        assert job.hear(2) == ("has its batch",)
        # The source waits for rank 1, long before the timeout.
        begin = time.monotonic()
        job.signal(0, signal.SIGINT)
        assert job.hear(2) == ("PeerFailedError",)
        assert time.monotonic() - begin < NOTICED
        job.tell(1)
        assert job.hear(1) == ("has its batch",)
        assert job.hear(1) == ("PeerFailedError",)
        assert job.hear(0) == ("PeerFailedError",)
        job.tell_all()
        job.expect_end()


def news_beside_a_late_one(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    a_step(rank, 0)
    if rank == 1:
        line.hear()
    elif rank == 0:
        kind, text, _ = outcome(lambda: a_step(0, 1))
        assert kind == "TimedOutError" and "rank 1 did not come within 2 s" in text, text
    if rank != 0:
        a_step(rank, 1)
    kind, _, _ = outcome(lambda: td.scatter_batch([] if rank == 0 else None))
    line.say(kind)
    a_step(rank, 3)


def test_an_error_of_the_source_arrives_although_a_rank_of_another_node_is_late(tmp_path: Path) -> None:
    with Job(news_beside_a_late_one, 3, tmp_path, seconds=2.0) as job:
        assert job.hear(2) == ("PeerFailedError",)
        job.tell(1)
        assert job.hear(0) == ("InvalidInputError",)
        assert job.hear(1) == ("PeerFailedError",)
        job.expect_end()


def interrupted(error: type[BaseException]) -> Iterator[Any]:
    yield 0
    raise error


def source_that_is_to_end(rank: int, line: Line) -> None:
    node, name = line.hear()
    on_nodes(rank, node)
    a_step(rank, 0)
    if rank == 1:
        line.hear()
    is_same_node = node > 1
    for number in range(1, 1 + AHEAD * is_same_node):
        a_step(rank, number)
    for _ in range(2 * is_same_node):
        # They fill the queue.
        assert outcome(lambda: td.scatter_batch([] if rank == 0 else None))[0]
    begin = time.monotonic()
    given = interrupted(getattr(builtins, name)) if rank == 0 else None
    kind, _, _ = outcome(lambda: td.scatter_batch(given))
    line.say(kind, time.monotonic() - begin)
    line.hear()


@pytest.mark.parametrize("node", [1, 2], ids=["two nodes", "one node"])
@pytest.mark.parametrize("name", ["KeyboardInterrupt", "SystemExit"])
def test_ending_a_source_does_not_wait_for_a_late_rank(name: str, node: int, tmp_path: Path) -> None:
    with Job(source_that_is_to_end, 2, tmp_path) as job:
        job.tell_all((node, name))
        kind, seconds = job.hear(0)
        assert kind == name and seconds < NOTICED
        job.tell(1)
        assert job.hear(1)[0] == "PeerFailedError"
        job.tell_all()
        job.expect_end()
