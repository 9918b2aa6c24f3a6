"""`node_shared` while its builder fails or is killed, at many points, and while all ranks are killed at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.distributed.rank_processes import Job, Line, outcome
from support.soak import IS_SOAK
from support.waiting import NOTICED

import tundish as td

MIB = 1 << 20


def be_of_node(rank: int, node: int, local_rank: int, size: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "GROUP_RANK": str(node),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(size),
    }


def failing(rank: int, line: Line) -> None:
    # Two nodes of two ranks; the builder of the second one takes its time.
    be_of_node(rank, rank // 2, rank % 2, 2)
    at: list[float] = []

    def build() -> np.ndarray:
        if rank == 2:
            line.say("building")
            line.hear()
            return np.arange(3)
        at.append(time.monotonic())
        raise OSError("the disk is gone")

    heard = outcome(lambda: td.shm.node_shared(build))
    line.say(*heard, time.monotonic(), *at)


def test_a_failing_builder_fails_all_ranks_within_a_second(tmp_path: Path) -> None:
    with Job(failing, 4, tmp_path) as job:
        assert job.hear(2) == ("building",)
        kind, text, _, _, failed = job.hear(0)
        assert (kind, text) == ("OSError", "the disk is gone")
        for rank in (1, 3):
            kind, text, named, at = job.hear(rank)
            assert (kind, named) == ("PeerFailedError", 0)
            assert "OSError: the disk is gone" in text
            assert at - failed < NOTICED
        # The other builder gets the error after its build.
        job.tell(2)
        assert job.hear(2)[0] == "PeerFailedError"
        job.expect_end()


def interrupted(rank: int, line: Line) -> None:
    def build() -> np.ndarray:
        line.say("building")
        time.sleep(30)
        return np.arange(3)

    line.say(*outcome(lambda: td.shm.node_shared(build)), time.monotonic())
    line.say(td.shm.node_shared(np.arange(3)).tolist())


def test_ctrl_c_in_the_builder_is_raised_on_all_ranks(tmp_path: Path) -> None:
    with Job(interrupted, 2, tmp_path) as job:
        assert job.hear(0) == ("building",)
        before = time.monotonic()
        job.signal(0, signal.SIGINT)
        heard = job.hear_all()
        assert [message[0] for message in heard] == ["KeyboardInterrupt", "PeerFailedError"]
        assert all(message[-1] - before < NOTICED for message in heard)
        assert job.hear_all() == [([0, 1, 2],)] * 2
        job.expect_end()


def shared_many_times(rank: int, line: Line) -> None:
    """Arrays in memory and in files, until an error ends it."""
    folder = Path(line.hear())
    # From here on ranks notice killed ranks.
    td.distributed.vote(what="all are here")
    line.say("begins")

    def share() -> None:
        for number in range(1000):
            kept: Any = td.shm.node_shared(lambda: np.full(2 * MIB, number), key=f"array {number}")  # noqa: B023
            assert kept[-1] == number
            stored = td.shm.node_shared(lambda: np.full(MIB // 8, number), path=folder)  # noqa: B023
            assert stored[-1] == number

    line.say(*outcome(share), time.monotonic())


# Moments over several turns of the loop above: in the build, the copies, the writes and the votes.
MOMENTS = range(12) if IS_SOAK else (0, 4, 8, 11)


@pytest.mark.parametrize("moment", [0.01 * 1.4**step for step in MOMENTS])
def test_a_builder_killed_at_any_moment_is_noticed_within_a_second(moment: float, tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    with Job(shared_many_times, 3, tmp_path) as job:
        job.tell_all(str(folder))
        job.hear_all()
        time.sleep(moment)
        killed = time.monotonic()
        job.signal(0, signal.SIGKILL)
        for rank in (1, 2):
            kind, text, _, at = job.hear(rank)
            assert kind in ("PeerFailedError", "NotFoundError", "StorageError"), text
            assert at - killed < NOTICED
        job.expect_end(1, 2)
    # A published file is whole, and the next call removes an unfinished one.
    td.shm.node_shared(np.arange(3), key="after", path=folder)
    assert not list(folder.glob(".*"))
    for path in folder.rglob("*.npy"):
        array = np.load(path, mmap_mode="r")
        assert (array == array[0]).all() or array.tolist() == [0, 1, 2]


def killed_in_the_build(rank: int, line: Line) -> None:
    def build() -> np.ndarray:
        line.say("building")
        time.sleep(30)
        return np.arange(3)

    line.say(*outcome(lambda: td.shm.node_shared(build)), time.monotonic())


@pytest.mark.parametrize("world", [2, 4])
def test_a_builder_killed_in_its_callable_is_noticed_within_a_second(world: int, tmp_path: Path) -> None:
    with Job(killed_in_the_build, world, tmp_path) as job:
        assert job.hear(0) == ("building",)
        killed = time.monotonic()
        job.signal(0, signal.SIGKILL)
        others = range(1, world)
        for kind, text, named, at in job.hear_all(*others):
            assert (kind, named) == ("PeerFailedError", 0)
            assert "was killed or vanished" in text
            assert at - killed < NOTICED
        job.expect_end(*others)


def kept_after_the_builder(rank: int, line: Line) -> None:
    array = td.shm.node_shared(lambda: np.arange(MIB))
    line.say("shared")
    line.hear()
    line.say(int(array.sum()))


def test_the_array_outlives_its_builder(tmp_path: Path) -> None:
    with Job(kept_after_the_builder, 3, tmp_path) as job:
        job.hear_all()
        job.signal(0, signal.SIGKILL)
        assert job.exit_code(0) == -signal.SIGKILL
        for rank in (1, 2):
            job.tell(rank)
            assert job.hear(rank) == (MIB * (MIB - 1) // 2,)
        job.expect_end(1, 2)


SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}, {here!r}]
from support.distributed import rank_processes
from support.distributed.rank_processes import Job
from test_node_sharing_faults import shared_many_times

if __name__ == "__main__":
    folder = Path({folder!r})
    # Its own fork server imports no more than these ranks need.
    rank_processes.PRELOADED[:] = ["torch", "tundish.shm"]
    before = sorted(os.listdir("/dev/shm"))
    chance = random.Random(4)
    for turn in range({turns}):
        (folder / str(turn)).mkdir()
        with Job(shared_many_times, 3, folder / str(turn)) as job:
            job.tell_all(str(folder / "arrays"))
            job.hear_all()
            time.sleep(chance.uniform(0, 0.5))
            for rank in range(3):
                job.signal(rank, signal.SIGKILL)
        after = sorted(os.listdir("/dev/shm"))
        assert after == before, after
    print("nothing is left")
"""


def test_all_ranks_killed_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    """In a mount namespace of its own, with a private /dev/shm."""
    script = tmp_path / "script.py"
    here = Path(__file__).parent
    script.write_text(
        SCRIPT.format(tests=str(here.parents[1]), here=str(here), folder=str(tmp_path), turns=6)
    )
    command = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} {script}"
    ran = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == ("nothing is left\n", 0), ran.stderr
