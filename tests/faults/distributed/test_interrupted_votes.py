"""Ctrl-C in a vote of one rank: its voter closes and says so, and the others raise an error that names the rank."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from support.distributed.rank_processes import Job, Line, outcome, voter_on_node

from tundish.distributed import Voter, node_identity

TURNS = 8


def interrupted(rank: int, line: Line) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    several_nodes = line.hear()
    for _ in range(TURNS):
        voter = voter_on_node(f"node {rank}" if several_nodes else node_identity())
        for _ in range(3):
            voter.vote(what="all are well", timeout=60)
        line.say("ready")
        kind = ""
        try:
            while not kind:
                kind, text, named = outcome(lambda: voter.vote(what="a step", timeout=60))  # noqa: B023 (called here)
        except KeyboardInterrupt:
            pass
        failed = time.monotonic()
        if rank == 0:
            kind, text, named = outcome(lambda: voter.vote(what="the next step", timeout=60))  # noqa: B023
            if not kind:
                # Ctrl-C came between two votes. A rank of another node learns of that only from a vote.
                outcome(lambda: voter.vote(KeyboardInterrupt(), what="a step", timeout=60))  # noqa: B023
                voter.close()
                kind, text, named = outcome(lambda: voter.vote(what="the next step", timeout=60))  # noqa: B023
        line.say(kind, text, named, failed)
        voter.close()
        line.hear()


@pytest.mark.parametrize("several_nodes", [False, True])
def test_an_interrupted_voter_is_closed_and_the_others_name_its_rank(
    several_nodes: bool, tmp_path: Path
) -> None:
    drawn = random.Random(f"{several_nodes}")
    with Job(interrupted, 2, tmp_path) as job:
        job.tell_all(several_nodes)
        for _ in range(TURNS):
            assert job.hear_all() == [("ready",)] * 2
            time.sleep(drawn.uniform(0.0, 0.05))
            sent = time.monotonic()
            job.signal(0, signal.SIGINT)
            (refused, text, _, interrupted_at), (kind, other, named, failed_at) = job.hear_all()
            assert refused == "InvalidInputError" and "is closed" in text
            assert (kind, named) == ("PeerFailedError", 0), other
            # time: 20 times the promise of half a second; the timeout is 60
            assert interrupted_at - sent < 10 and failed_at - sent < 10
            job.tell_all()
        job.expect_end()


def a_block_is_let_go_of(rank: int, line: Line) -> None:
    with Voter(timeout=60) as own:
        if rank == 0:
            block = own.agreed("a block", timeout=60)
            block.__enter__()
            # As a kept traceback of a Ctrl-C does that came as the block was entered or left.
            del block
        line.say(outcome(lambda: own.vote(what="the next step", timeout=60)))


def test_a_block_that_was_never_left_votes_no_later(tmp_path: Path) -> None:
    with Job(a_block_is_let_go_of, 2, tmp_path) as job:
        assert job.hear_all() == [(("", "", None),)] * 2
        job.expect_end()
