"""Two ranks that train are killed at every failpoint: one of them, or all at the same moment.

The calls are those of a run that goes well: every system call that changes the disk on either rank. The run opens a
root that an interrupted job left, saves both kinds, removes old checkpoints and overwrites a step. Ranks are killed
before each call and after it. Here ten calls of different sorts, under `make soak` all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoint import failpoints as failpoints
from support.checkpoint.failpoints import SystemCall
from support.checkpoint.interrupted_root import InterruptedRoot
from support.checkpoint.training_jobs import check_next_start, train
from support.distributed.rank_processes import Job
from support.soak import IS_SOAK, chosen
from support.waiting import NOTICED


def tried(calls: list[tuple[int, SystemCall]]) -> Iterator[tuple[int, SystemCall, bool, bool]]:
    """Rank, call, whether after the call, whether all ranks are killed."""
    if IS_SOAK:
        for (rank, call), is_after, is_all in itertools.product(calls, (False, True), (False, True)):
            yield rank, call, is_after, is_all
        return
    of_sort = {(rank, *call.sort): (rank, call) for rank, call in calls}
    turns = itertools.cycle([(True, False), (False, True), (False, False), (True, True)])
    for (rank, call), (is_after, is_all) in zip(chosen(list(of_sort.values())), turns, strict=False):
        yield rank, call, is_after, is_all


@pytest.mark.timeout(14400 if IS_SOAK else 600)
def test_killed_at_any_failpoint_the_next_start_goes_on(
    interrupted_root: InterruptedRoot, tmp_path: Path
) -> None:
    missed = []
    runs = list(tried(interrupted_root.calls()))
    for rank, call, is_after, is_all in runs:
        what = f"rank {rank} {'and all ' if is_all else ''}killed {'after' if is_after else 'before'} {call}"
        root = interrupted_root.reset()
        with Job(train, 2, tmp_path, fresh=True) as job:
            fault = failpoints.environment(call, f"kill {2 * call.number + is_after}")
            interrupted_root.start(job, rank, fault)
            interrupted_root.start(job, 1 - rank, {})
            if not ends_by_kill(job, rank):
                missed.append(what)
                continue
            if is_all:
                # It may have heard of the other one by now, and ended.
                with contextlib.suppress(ProcessLookupError):
                    job.signal(1 - rank, signal.SIGKILL)
            else:
                started = time.monotonic()
                assert last_of(job, 1 - rank)[0] == "failed", what
                assert time.monotonic() - started < NOTICED, what
        try:
            check_next_start(root)
        except BaseException as error:
            raise AssertionError(what) from error
    # Two threads of a rank make the same calls in the one or the other order.
    assert len(missed) <= len(runs) / 20, missed


def ends_by_kill(job: Job, rank: int) -> bool:
    try:
        assert last_of(job, rank) == ("done", 5)
    except EOFError:
        return True
    return False


def last_of(job: Job, rank: int) -> Any:
    while (message := job.hear(rank))[0] == "resumed":
        pass
    return message
