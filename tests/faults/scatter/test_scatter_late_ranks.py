"""Scatters in which a rank is slow, stopped or interrupted: who hears of it, when, and whose name is in it.

Times are taken on the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tundish as td

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))

from rank_processes import Job, Line, outcome

# The promise: a failure is known within so many seconds.
KNOWN = 1.0
# Rounds that a source may be ahead of a rank of its node.
AHEAD = 4


def a_round(rank: int, number: int) -> None:
    given = [{"x": torch.full((1000,), number + other)} for other in range(dist.get_world_size())]
    mine = td.scatter_batch(given if rank == 0 else None)
    assert mine["x"].tolist() == [number + rank] * 1000


def failure_beside_a_slow_one(rank: int, line: Line) -> None:
    a_round(rank, 0)
    if rank == 1:
        line.say("busy")
        line.hear()
    for number in range(1, AHEAD + 1):
        a_round(rank, number)
    if rank == 0:
        line.hear()
    for number in range(2):
        kind, _, _ = outcome(lambda: td.scatter_batch([] if rank == 0 else None))
        line.say(kind, time.monotonic())
        if number == 0 and rank == 0:
            line.hear()
    a_round(rank, 9)


def test_what_the_source_fails_with_is_known_though_a_rank_is_far_behind(tmp_path: Path) -> None:
    with Job(failure_beside_a_slow_one, 3, tmp_path) as job:
        assert job.hear(1) == ("busy",)
        begin = time.monotonic()
        job.tell(0)
        for rank, expected in ((0, "InvalidInputError"), (2, "PeerFailedError")):
            kind, at = job.hear(rank)
            assert kind == expected
            assert at - begin < KNOWN
        job.tell(0)
        assert job.hear(0)[0] == "InvalidInputError"
        job.tell(1)
        # The one that was behind hears of both in their rounds.
        assert [job.hear(1)[0], job.hear(1)[0]] == ["PeerFailedError"] * 2
        assert job.hear(2)[0] == "PeerFailedError"
        job.expect_end()
