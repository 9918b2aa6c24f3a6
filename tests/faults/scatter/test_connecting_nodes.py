"""Ranks that are killed, or interrupted, while a scatter connects the nodes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from support.distributed.rank_processes import Job, Line, on_nodes, outcome
from support.interrupts import until_it_waits

import tundish as td
from tundish.scatter import rendezvous

# time: ten times the promise of 1 s; connecting itself waits for half an hour
NOTICED = 10.0


def scattering(rank: int, line: Line) -> None:
    """Each rank is a node of its own; the last one stops itself when it is about to connect."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    on_nodes(rank, 1)
    td.distributed.vote(what="all are well")
    make = rendezvous.new_subgroup

    def stop_first(*given: Any, **named: Any) -> Any:
        line.say("connects")
        os.kill(os.getpid(), signal.SIGSTOP)
        return make(*given, **named)

    if rank == 2:
        rendezvous.new_subgroup = stop_first  # in this process alone
    line.say("ready", os.getpid())
    line.say(*outcome(lambda: td.scatter_batch(torch.ones(2) if rank == 0 else None)), time.monotonic())


def begin(job: Job) -> None:
    """Have all ranks wait for the last one, which is stopped."""
    processes = [process for _, process in job.hear_all()]
    assert job.hear(2) == ("connects",)
    for process in processes[:-1]:
        until_it_waits(process)


def test_a_rank_that_is_killed_is_named_by_all(tmp_path: Path) -> None:
    with Job(scattering, 3, tmp_path) as job:
        begin(job)
        killed = time.monotonic()
        job.signal(2, signal.SIGKILL)
        for kind, text, named, at in job.hear_all(0, 1):
            assert (kind, named) == ("PeerFailedError", 2), text
            assert "was killed or vanished" in text
            assert at - killed < NOTICED


def test_an_interrupted_rank_does_not_wait_and_is_named_by_the_others(tmp_path: Path) -> None:
    with Job(scattering, 3, tmp_path) as job:
        begin(job)
        sent = time.monotonic()
        job.signal(1, signal.SIGINT)
        kind, *_, at = job.hear(1)
        assert kind == "KeyboardInterrupt"
        assert at - sent < NOTICED
        kind, text, named, at = job.hear(0)
        assert (kind, named) == ("PeerFailedError", 1), text
        assert at - sent < NOTICED
        job.signal(2, signal.SIGCONT)
        kind, text, named, _ = job.hear(2)
        assert (kind, named) == ("PeerFailedError", 1), text
