"""The helper that starts ranks shows where and how one ended, and gives their processes to the next job."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.distributed.rank_processes import FILE, Job, Line, outcome


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


def say_who(rank: int, line: Line) -> None:
    """Leaves variables, a folder and groups."""
    who = os.getpid(), dist.get_rank(), dist.get_world_size(), os.environ.get("LEFT"), os.getcwd()
    group = dist.new_group(list(range(dist.get_world_size())))
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, rank, group=group)
    assert values == list(range(dist.get_world_size()))
    os.environ["LEFT"] = "behind"
    os.chdir("/")
    line.say(*who)


def run(size: int, folder: Path, **settings: Any) -> list[int]:
    """The processes of a job that finds nothing of an earlier one."""
    folder.mkdir()
    with Job(say_who, size, folder, **settings) as job:
        said = job.hear_all()
        job.expect_end()
    assert [one[1:4] for one in said] == [(rank, size, None) for rank in range(size)]
    assert {one[4] for one in said} != {"/"}
    return [process for process, *_ in said]


def test_the_next_job_has_the_processes_and_nothing_else_of_the_last_one(tmp_path: Path) -> None:
    three = run(3, tmp_path / "three")
    four = run(4, tmp_path / "four")
    assert set(three) < set(four)
    assert set(run(2, tmp_path / "two", host=FILE)) < set(four)
    assert not set(run(2, tmp_path / "fresh", fresh=True)) & set(four)
    assert set(run(4, tmp_path / "again")) == set(four)


def leave_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def replace_a_function() -> None:
    from tundish.distributed import voter

    voter.node_identity = lambda: "elsewhere"


def replace_a_function_of_torch() -> None:
    dist.barrier = lambda: None  # type: ignore[assignment]


def add_a_handler() -> None:
    logging.getLogger("tundish").addHandler(logging.NullHandler())


def ignore_a_signal() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leave_a_child() -> None:
    if os.fork() == 0:
        signal.alarm(20)
        signal.pause()


CHANGES = [
    leave_a_thread,
    replace_a_function,
    replace_a_function_of_torch,
    add_a_handler,
    ignore_a_signal,
    leave_a_child,
]


def change(rank: int, line: Line) -> None:
    line.say(os.getpid())
    CHANGES[line.hear()]()


@pytest.mark.parametrize("what", CHANGES)
def test_a_process_that_a_job_changed_is_not_used_again(what: Callable[[], None], tmp_path: Path) -> None:
    with Job(change, 1, tmp_path) as job:
        job.tell(0, CHANGES.index(what))
        (changed,) = job.hear(0)
        job.expect_end()
    assert changed not in run(4, tmp_path / "next")


def fail(rank: int, line: Line) -> None:
    line.say(os.getpid())
    if rank == 1:
        raise ValueError("no")
    line.say(outcome(dist.barrier)[0] != "")


def test_a_job_that_failed_ends_with_its_processes(tmp_path: Path) -> None:
    with Job(fail, 2, tmp_path) as job:
        failed = {process for (process,) in job.hear_all()}
        with pytest.raises(AssertionError, match="ValueError: no"):
            job.hear(1)
    assert not failed & set(run(4, tmp_path / "next"))


def say_who_twice(rank: int, line: Line) -> None:
    line.say(os.getpid())
    line.hear()
    line.say(os.getpid())


def test_a_signalled_process_is_not_used_again(tmp_path: Path) -> None:
    with Job(say_who_twice, 2, tmp_path) as job:
        first, second = (process for (process,) in job.hear_all())
        job.signal(1, signal.SIGSTOP)
        job.signal(1, signal.SIGCONT)
        job.tell_all()
        job.hear_all()
        job.expect_end()
    following = run(4, tmp_path / "next")
    assert first in following
    assert second not in following
