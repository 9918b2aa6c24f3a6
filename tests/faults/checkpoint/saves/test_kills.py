"""Ranks that train and save are killed at random times, and the next start goes on.

On the module that users get, with a fixed seed; 300 times under `make soak`. After each kill `training.check` looks at
what is there, bit by bit, and the next start has to resume at the newest step with nothing left over.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from support.checkpoint.training_jobs import check, hidden, train
from support.distributed.rank_processes import Job
from support.soak import IS_SOAK
from support.waiting import PATIENCE

from tundish.checkpoint import Checkpointer

KILLS = 300 if IS_SOAK else 10
# About what a start takes; then steps that are published before a kill, and about what some more take.
STARTING, STEPS, TRAINING = 0.5, 2, 0.3


def wait_for_step(root: Path, step: int) -> None:
    """Until it is published, however fast the machine is."""
    deadline = time.monotonic() + PATIENCE
    while step > max((int(path.name[4:]) for path in root.glob("dcp-[0-9]*")), default=0):
        assert time.monotonic() < deadline, f"nobody saves step {step}"
        time.sleep(0.002)


@pytest.mark.timeout(120 + 20 * KILLS)
def test_whatever_is_killed_the_next_start_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    draw = random.Random(20261121)
    newest: dict[str, int] = {}
    moments = {"starting": 0, "training": 0}
    for _ in range(KILLS):
        with Job(train, 2, tmp_path) as job:
            job.tell_all({"root": str(root)})
            if draw.random() < 0.2:
                moments["starting"] += 1
                time.sleep(draw.uniform(0, STARTING))
            else:
                moments["training"] += 1
                resumed, same = job.hear_all()
                assert resumed == ("resumed", newest.get("dcp", 0), [])
                assert same == ("resumed", newest.get("dcp", 0), [])
                wait_for_step(root, newest.get("dcp", 0) + draw.randint(0, STEPS))
                time.sleep(draw.uniform(0, TRAINING))
            for rank in draw.choice([(0,), (1,), (0, 1)]):
                job.signal(rank, signal.SIGKILL)
        before, newest = newest, check(root)
        assert newest.get("dcp", 0) >= before.get("dcp", 0)
    # The last ones that were killed left what only the next start removes.
    Checkpointer(root, on_failure="raise").close()
    assert hidden(root) == []
    assert min(moments.values()) > 0
    assert newest["dcp"] > KILLS / 2, "there was something to lose"
