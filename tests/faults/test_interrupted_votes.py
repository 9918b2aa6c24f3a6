"""Ctrl-C at every moment of a vote on one rank: the others hear of it, and the next vote is of all."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from support.distributed.ctrl_c import CtrlC, at_every_moment
from support.distributed.rank_processes import Job, Line, outcome

from tundish import waiting
from tundish.distributed import Voter, ballots, channel, vote_round, voter, watch
from tundish.distributed.watch import PeerWatch


def interrupted(rank: int, line: Line) -> None:
    in_store = line.hear()
    with Voter(timeout=60) as voter:
        if rank == 1:
            kinds = []
            slowest = 0.0
            is_over = False
            while not is_over:
                began = time.monotonic()
                kinds.append(
                    outcome(lambda: voter.vote(what="an interrupted step", flag=in_store, timeout=60))[0]
                )
                slowest = max(slowest, time.monotonic() - began)
                is_over = voter.vote(what="the next step", timeout=60)
            line.say(kinds, slowest)
            return
        knows = []
        for _, ctrl_c in at_every_moment(waiting, channel, ballots, vote_round):
            before = voter.last_vote.number
            with ctrl_c:
                voter.vote(what="an interrupted step", flag=in_store, timeout=60)
            if voter.last_vote.number == before:
                # It came before this rank was in the vote, and so it is to be in it now.
                outcome(lambda: voter.vote(KeyboardInterrupt(), what="an interrupted step", timeout=60))
            knows.append(voter.note_in_spite_of_interrupt() is not None)
            voter.vote(what="the next step", flag=not ctrl_c.came, timeout=60)
        line.say(knows)


# `in_store`: the votes are such as the ranks of one node cannot decide among themselves.
@pytest.mark.parametrize("in_store", [False, True])
def test_an_interrupted_vote_holds_up_nobody_and_is_the_same_for_all(in_store: bool, tmp_path: Path) -> None:
    with Job(interrupted, 2, tmp_path) as job:
        for rank in range(2):
            job.tell(rank, in_store)
        (knows,) = job.hear(0)
        kinds, slowest = job.hear(1)
        assert len(knows) > 5
        assert kinds == ["" if knew else "PeerFailedError" for knew in knows]
        assert {"", "PeerFailedError"} == set(kinds)
        # Not the timeout.
        assert slowest < 30


def a_block_is_let_go_of(rank: int, line: Line) -> None:
    with Voter(timeout=60) as own:
        if rank == 0:
            block = own.agreed("a block", timeout=60)
            block.__enter__()
            # As with the error of a Ctrl-C that came as the block was entered or left, which somebody kept so long.
            del block
        line.say(outcome(lambda: own.vote(what="the next step", timeout=60)))


def test_a_block_that_was_never_left_votes_no_later(tmp_path: Path) -> None:
    with Job(a_block_is_let_go_of, 2, tmp_path) as job:
        assert job.hear_all() == [(("", "", None),)] * 2
        job.expect_end()


def interrupted_in_close(rank: int, line: Line) -> None:
    # Each at another moment, while the other rank looks on.
    for number in range(MOMENTS):
        own = Voter(timeout=60)
        if rank == 0:
            with CtrlC(number, channel, voter, is_suppressed=True) as ctrl_c:
                own.close()
            # As whoever was interrupted does.
            own.close()
            line.say(ctrl_c.came)
            line.hear()
        else:
            began = time.monotonic()
            kind, _, _ = outcome(lambda: own.vote(what="a vote without it", timeout=60))  # noqa: B023 (called here)
            line.say(kind, time.monotonic() - began < 30)
            own.close()
            line.hear()


# A few more than there are in `close`.
MOMENTS = 12


def test_a_voter_whose_end_was_interrupted_ends_at_the_second_try(tmp_path: Path) -> None:
    with Job(interrupted_in_close, 2, tmp_path) as job:
        came = []
        for _ in range(MOMENTS):
            came.append(job.hear(0)[0])
            assert job.hear(1) == ("PeerFailedError", True)
            job.tell(0)
            job.tell(1)
        assert came[0] and not came[-1]
        job.expect_end()


def test_a_rank_that_is_gone_stays_known_though_ctrl_c_comes_as_it_is_found() -> None:
    for moment, ctrl_c in at_every_moment(watch):
        with contextlib.ExitStack() as watches:
            mine, gone, other = (watches.enter_context(contextlib.closing(PeerWatch())) for _ in range(3))
            mine.connect({1: gone.address, 2: other.address})
            gone.close()
            with ctrl_c:
                mine.vanished()
            assert mine.vanished() == {1}, moment
            other.close()
            assert mine.vanished() == {1, 2}, moment
