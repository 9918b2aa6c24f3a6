"""Votes for which somebody knows that a rank will not come."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.distributed.rank_processes import FILE, LAUNCHER, RANK0, Job, Line, outcome

from tundish.distributed import Voter
from tundish.distributed.verdict import RankFailure


def at_lunch(rank: int, line: Line) -> None:
    with Voter(timeout=20) as voter:
        if rank != 2:
            begun = time.monotonic()
            with voter.extra_failure_source(lambda: RankFailure(rank=2, text="is at lunch")):
                line.say(*outcome(lambda: voter.vote(what="a step", timeout=20)), time.monotonic() - begun)
        line.hear()
        # It is late for that one, and in step again; nobody is missed any more.
        line.say(*outcome(lambda: voter.vote(what="a step", timeout=20) if rank == 2 else None))
        voter.vote(what="the next step", timeout=20)
        # Who comes is not missed, whatever is said of him.
        with voter.extra_failure_source(lambda: None):
            voter.vote(what="the last step", timeout=20)


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_a_rank_that_will_not_come_is_not_waited_for(host: str, tmp_path: Path) -> None:
    with Job(at_lunch, 3, tmp_path, host=host) as job:
        for kind, text, named, seconds in job.hear_all(0, 1):
            assert (kind, text, named) == ("PeerFailedError", "a step: rank 2 is at lunch", 2)
            # It looks around once a second, and once more may have to wait for its turn.
            assert seconds < 2.5
        for rank in range(3):
            job.tell(rank)
        assert [kind for kind, _, _ in job.hear_all()] == ["", "", "PeerFailedError"]
        job.expect_end()
