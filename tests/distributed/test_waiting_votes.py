"""Votes that wait: warnings that name the missing ranks, and early signs that a vote will fail."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from support.distributed.rank_processes import Job, Line, outcome
from support.waiting import PATIENCE

from tundish.distributed import Voter, vote_protocol

WARN_AFTER = 1.0


class Reporting(logging.Handler):
    """Sends each message to the test."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.say("warned", record.getMessage())


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
    warns = line.hear()
    vote_protocol._CHECK_SECONDS = 0.05
    with Voter(timeout=60, warn_after=WARN_AFTER if warns else None) as voter:
        for _ in range(3):
            voter.vote(what="a step", timeout=60)
        before = keys()
        logging.getLogger("tundish.distributed").addHandler(Reporting(line))
        if rank == 2:
            line.hear()
        voter.vote(what="a long step", timeout=60)
        logging.getLogger("tundish.distributed").handlers.clear()
        for _ in range(3):
            voter.vote(what="a step", timeout=60)
        line.say("grown", keys() - before)


@pytest.mark.parametrize("warns", [True, False])
def test_one_waiting_rank_logs_the_missing_ranks(warns: bool, tmp_path: Path) -> None:
    warned, grown = [], []
    with Job(wait_long, 3, tmp_path) as job:
        job.tell_all(warns)
        # One of the waiting ranks logs each warning. The next one comes when twice the time has passed.
        until = time.monotonic() + (PATIENCE if warns else 2 * WARN_AFTER)
        while time.monotonic() < until and len(warned) < 2:
            warned.extend(job.hear(rank) for rank in (0, 1) if job.says(rank))
        job.tell(2)
        for rank in range(3):
            while (said := job.hear(rank))[0] == "warned":
                warned.append(said)
            grown.append(said)
        job.expect_end()
    expected = [
        f"a long step has waited {WARN_AFTER * 2**turn:g} s for rank 2: " for turn in range(len(warned))
    ]
    texts = sorted((text for _, text in warned), key=lambda text: float(text.split()[5]))
    assert [text[: len(start)] for text, start in zip(texts, expected, strict=True)] == expected
    assert len(warned) >= 2 if warns else not warned
    # Nothing of it stays in the store.
    assert grown == [("grown", 0)] * 3


class Full(Reporting):
    """Fails after it told the test."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        raise OSError("no space left for the log")


def wait_with_a_full_log(rank: int, line: Line) -> None:
    logging.getLogger("tundish.distributed").addHandler(Full(line))
    vote_protocol._CHECK_SECONDS = 0.05
    with Voter(timeout=60, warn_after=0.25 if rank == 1 else None) as voter:
        if rank == 2:
            line.hear()
        line.say(*outcome(lambda: voter.vote(what="a long step", timeout=60)))
        logging.getLogger("tundish.distributed").handlers.clear()
        line.say(*outcome(lambda: voter.vote(what="the next step", timeout=60)))


def test_a_log_that_cannot_be_written_ends_no_vote(tmp_path: Path) -> None:
    with Job(wait_with_a_full_log, 3, tmp_path) as job:
        assert job.hear(1)[0] == "warned"
        job.tell(2)
        while (said := job.hear(1))[0] == "warned":
            pass
        assert [said, *job.hear_all(0, 2)] == [("", "", None)] * 3
        assert job.hear_all() == [("", "", None)] * 3
        job.expect_end()
