"""While two ranks train, each operation on the disk goes wrong once: it fails, is cut short, or panics.

The calls are those of `test_failpoint_kills`. After any failure on one rank, all ranks report the same outcome of every
save, later saves succeed, and the root has the reported checkpoints. Tests ten calls, and under `make soak` all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoint import failpoints as failpoints
from support.checkpoint.failpoints import SystemCall
from support.checkpoint.interrupted_root import InterruptedRoot
from support.checkpoint.training_jobs import check_next_start, train_through_failures
from support.distributed.rank_processes import Job
from support.soak import IS_SOAK, chosen

EIO, ENOSPC = 5, 28


def tried(calls: list[tuple[int, SystemCall]]) -> Iterator[tuple[int, SystemCall, str]]:
    """Rank, call, and what goes wrong in it."""

    def faults(call: SystemCall) -> list[str]:
        number = call.number
        found = [
            f"fail {number} {EIO}",
            f"fail {number} {ENOSPC}",
            f"panic {number}",
            f"fail-after {number} {EIO}",
        ]
        return [f"short {number} 100", *found] if call.operation == "write" else found

    if IS_SOAK:
        for rank, call in calls:
            for fault in faults(call):
                yield rank, call, fault
        return
    of_sort = {(rank, *call.sort): (rank, call) for rank, call in calls}
    for turn, (rank, call) in enumerate(chosen(list(of_sort.values()))):
        yield rank, call, faults(call)[turn % len(faults(call))]


@pytest.mark.timeout(14400 if IS_SOAK else 600)
def test_whatever_goes_wrong_once_all_ranks_hear_of_it_and_later_saves_succeed(
    interrupted_root: InterruptedRoot, tmp_path: Path
) -> None:
    went_wrong = 0
    for rank, call, fault in tried(interrupted_root.calls()):
        what = f"rank {rank}: {fault} of {call}"
        root = interrupted_root.reset()
        with Job(train_through_failures, 2, tmp_path, fresh=True) as job:
            interrupted_root.start(job, rank, failpoints.environment(call, fault))
            interrupted_root.start(job, 1 - rank, {})
            (_, here), (_, there) = job.hear_all()
            job.expect_end()
        told = {name: bool(error) for name, error in here.items()}
        assert told == {name: bool(error) for name, error in there.items()}, f"{what}: {here} {there}"
        failed = {name for name, is_failed in told.items() if is_failed}
        # The second start and all other saves are as good as ever.
        assert len(failed) <= 1, f"{what}: {here}"
        if "short" in fault:
            assert not failed, f"{what}: {here}"
        went_wrong += len(failed)
        try:
            check_next_start(root)
        except BaseException as error:
            raise AssertionError(f"{what}: {here}") from error
    assert went_wrong > 3
