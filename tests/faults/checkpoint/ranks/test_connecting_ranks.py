"""Ranks that are killed, or interrupted, while the first save of sharded tensors connects them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import Job, Line, outcome
from support.interrupts import until_it_waits

from tundish.checkpoint.hf import gather

# time: ten times the promise of 1 s; connecting itself waits for up to 60 s
NOTICED = 10.0


def saving(rank: int, line: Line) -> None:
    """Saves a sharded tensor; the last rank stops itself when it is about to connect."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from tundish.checkpoint import Checkpointer

    signal.signal(signal.SIGINT, signal.default_int_handler)
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    tensor = DTensor.from_local(torch.ones(8, 4), mesh, [Shard(0)], run_check=False)
    failures: list[BaseException] = []
    checkpointer = Checkpointer(line.hear(), on_failure=failures.append)
    make = gather.temporary_group

    def stop_first(*given: Any, **named: Any) -> Any:
        line.say("connects")
        os.kill(os.getpid(), signal.SIGSTOP)
        return make(*given, **named)

    if rank == size - 1:
        gather.temporary_group = stop_first  # type: ignore[assignment]  # in this process alone
    line.say("ready", os.getpid())
    came = outcome(lambda: checkpointer.save_hf(1, {"spread": tensor}).result(60))
    line.say(came, time.monotonic())
    line.hear()
    checkpointer.close()


def begin(job: Job, root: Path) -> list[int]:
    """Have all ranks wait for the last one, which is stopped; returns their processes."""
    for rank in range(job.size):
        job.tell(rank, root)
    processes = [process for _, process in job.hear_all()]
    assert job.hear(job.size - 1) == ("connects",)
    for process in processes[:-1]:
        until_it_waits(process)
    return processes


def test_a_rank_that_is_killed_is_named_by_all(tmp_path: Path) -> None:
    with Job(saving, 3, tmp_path) as job:
        begin(job, tmp_path / "root")
        killed = time.monotonic()
        job.signal(2, signal.SIGKILL)
        for (kind, text, named), at in job.hear_all(0, 1):
            assert (kind, named) == ("PeerFailedError", 2), text
            assert "was killed or vanished" in text
            assert at - killed < NOTICED
        for rank in (0, 1):
            job.tell(rank)
        job.expect_end(0, 1)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_rank_does_not_wait_and_is_named_by_the_others(
    interrupted: int, tmp_path: Path
) -> None:
    with Job(saving, 3, tmp_path) as job:
        begin(job, tmp_path / "root")
        sent = time.monotonic()
        job.signal(interrupted, signal.SIGINT)
        (kind, *_), at = job.hear(interrupted)
        assert kind == "KeyboardInterrupt"
        assert at - sent < NOTICED
        (kind, text, named), at = job.hear(1 - interrupted)
        assert (kind, named) == ("PeerFailedError", interrupted), text
        assert at - sent < NOTICED
        # It stood still meanwhile, and hears of it now.
        job.signal(2, signal.SIGCONT)
        (kind, text, named), _ = job.hear(2)
        assert (kind, named) == ("PeerFailedError", interrupted), text
        for rank in range(3):
            job.tell(rank)
        job.expect_end()
