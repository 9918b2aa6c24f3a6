"""Ctrl-C at every moment of a vote on one rank: the others hear of it, and the next vote is of all."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from ctrl_c import at_every_moment
from rank_processes import Job, Line, outcome

from tundish import waiting
from tundish.distributed import Voter, channel


def interrupted(rank: int, line: Line) -> None:
    with Voter(timeout=60) as voter:
        if rank == 1:
            kinds = set()
            slowest = 0.0
            is_over = False
            while not is_over:
                began = time.monotonic()
                kinds.add(outcome(lambda: voter.vote(what="an interrupted step", timeout=60))[0])
                slowest = max(slowest, time.monotonic() - began)
                is_over = voter.vote(what="the next step", timeout=60)
            line.say(sorted(kinds), slowest)
            return
        moments = 0
        for moments, ctrl_c in at_every_moment(waiting, channel):  # noqa: B007 (how many there were)
            before = voter.meeting.number
            with ctrl_c:
                voter.vote(what="an interrupted step", timeout=60)
            if voter.meeting.number == before:
                # It came before this rank was in the vote, and so it is to be in it now.
                outcome(lambda: voter.vote(KeyboardInterrupt(), what="an interrupted step", timeout=60))
            voter.vote(what="the next step", note=not ctrl_c.came, timeout=60)
        line.say(moments)


def test_an_interrupted_vote_holds_up_nobody(tmp_path: Path) -> None:
    with Job(interrupted, 2, tmp_path) as job:
        (moments,) = job.hear(0)
        kinds, slowest = job.hear(1)
        assert moments > 5
        assert set(kinds) <= {"", "PeerFailedError"}
        # Not the timeout.
        assert slowest < 30
