"""Votes that wait: warnings that name the missing ranks, and early signs that a vote will fail."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from support.distributed.rank_processes import Job, Line, outcome

from tundish.distributed import Voter
from tundish.distributed.vote_protocol import VoteProtocol


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def keys() -> int:
    """The number of keys in the store while no rank votes."""
    import torch.distributed as distributed

    distributed.barrier()
    # Rounds are tidied up in the background.
    time.sleep(0.3)
    count = int(distributed.distributed_c10d._get_default_store().num_keys())
    distributed.barrier()
    return count


def wait_long(rank: int, line: Line) -> None:
    warn_after = line.hear()
    kept = Kept()
    logging.getLogger("tundish.distributed").addHandler(kept)
    with Voter(timeout=60, warn_after=warn_after) as voter:
        for _ in range(3):
            voter.vote(what="a step", timeout=60)
        before = keys()
        if rank == 2:
            time.sleep(5)
        voter.vote(what="a long step", timeout=60)
        for _ in range(3):
            voter.vote(what="a step", timeout=60)
        line.say(kept.texts, keys() - before)


@pytest.mark.parametrize("warn_after", [1.0, None])
def test_one_waiting_rank_logs_the_missing_ranks(warn_after: float | None, tmp_path: Path) -> None:
    with Job(wait_long, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, warn_after)
        said = job.hear_all()
        job.expect_end()
    told = [text for texts, _ in said for text in texts]
    if warn_after is None:
        assert told == []
    else:
        # Again when twice as much has passed.
        assert 2 <= len(told) <= 3, told
        for text, seconds in zip(sorted(told), (1, 2, 4), strict=False):
            assert text.startswith(f"a long step has waited {seconds} s for rank 2: ")
    # Nothing of it stays in the store.
    assert [grown for _, grown in said] == [0, 0, 0]


class Full(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no space left for the log")


def wait_with_a_full_log(rank: int, line: Line) -> None:
    logging.getLogger("tundish.distributed").addHandler(Full())
    with Voter(timeout=60, warn_after=0.5) as voter:
        if rank == 2:
            time.sleep(3)
        line.say(*outcome(lambda: voter.vote(what="a long step", timeout=60)))
        line.say(*outcome(lambda: voter.vote(what="the next step", timeout=60)))


def test_a_log_that_cannot_be_written_ends_no_vote(tmp_path: Path) -> None:
    with Job(wait_with_a_full_log, 3, tmp_path) as job:
        for _ in range(2):
            assert job.hear_all() == [("", "", None)] * 3
        job.expect_end()


def look_at_a_slow_store(rank: int, line: Line) -> None:
    with Voter(timeout=30) as voter:
        if rank == 0:
            line.say(*outcome(lambda: voter.vote(ValueError("mine"), what="a step")))
            return
        fails = VoteProtocol.fails
        VoteProtocol.fails = lambda self, number: (time.sleep(0.3), fails(self, number))[1]
        found = []
        for _ in range(3):
            found.append(voter.next_vote_fails(0.05))
            time.sleep(0.5)
        line.say(found)
        line.say(*outcome(lambda: voter.vote(what="a step")))


def test_a_late_answer_of_the_store_counts(tmp_path: Path) -> None:
    with Job(look_at_a_slow_store, 2, tmp_path) as job:
        (found,) = job.hear(1)
        assert not found[0] and found[-1], found
        for kind, text, *_ in job.hear_all():
            assert kind and "mine" in text
        job.expect_end()
