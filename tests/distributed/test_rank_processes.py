"""The helper that starts ranks shows where and how one ended."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest
from support.distributed.rank_processes import Job, Line


def crash(rank: int, line: Line) -> None:
    line.say("here")
    faulthandler._sigsegv()  # type: ignore[attr-defined]  # made for tests


def be_killed(rank: int, line: Line) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_crashes_shows_where(tmp_path: Path) -> None:
    with Job(crash, 1, tmp_path) as job:
        assert job.hear(0) == ("here",)
        with pytest.raises(EOFError, match=r"(?s)rank 0 ended: SIGSEGV.*Segmentation fault.* in crash"):
            job.hear(0)


def test_a_rank_that_is_killed_shows_by_what(tmp_path: Path) -> None:
    with Job(be_killed, 1, tmp_path) as job, pytest.raises(EOFError, match="rank 0 ended: SIGKILL"):
        job.hear(0)
