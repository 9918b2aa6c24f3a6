"""DCP saves while ranks are stopped or killed, and while the disk refuses."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.dcp_states import OPTIONS, compare, new_saver, save
from support.distributed.rank_processes import Job, Line, outcome
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tundish.checkpoint import Checkpointer

NOTICED = 1.0


def read(folder: Path) -> Any:
    target = folder.with_name(f"{folder.name}.pt")
    dcp_to_torch_save(folder, target)
    return torch.load(target)


def state_of(number: int) -> dict[str, Any]:
    # Another form each time, so that plans have to travel.
    return {"w": torch.full((1000,), float(number)), f"of {number}": torch.ones(3)}


def plan_beside_a_rank_that_is_stopped(rank: int, line: Line) -> None:
    folder = line.hear()
    saver = new_saver(timeout=3)
    save(saver, state_of(0), folder / "0")
    plan = saver.plan(state_of(1))
    plan.reserve()
    compare(plan)
    staged = plan.stage()
    line.say("staged")
    line.hear()
    (folder / "1").mkdir(exist_ok=True)
    started = time.monotonic()
    failed = outcome(lambda: staged.write(folder / "1", OPTIONS))
    staged.release()
    line.say(failed[0], time.monotonic() - started)
    line.hear()
    for number in (2, 3):
        save(saver, state_of(number), folder / str(number))
    saver.close()


def test_a_rank_that_is_stopped_while_plans_are_gathered_spoils_one_save(tmp_path: Path) -> None:
    with Job(plan_beside_a_rank_that_is_stopped, 2, tmp_path) as job:
        job.tell(0, tmp_path)
        job.tell(1, tmp_path)
        job.hear_all()
        job.signal(1, signal.SIGSTOP)
        job.tell(0)
        job.tell(1)
        kind, seconds = job.hear(0)
        assert kind != "" and 2 < seconds < 10
        job.signal(1, signal.SIGCONT)
        assert job.hear(1)[0] != ""
        job.tell(0)
        job.tell(1)
        job.expect_end()
    for number in (0, 2, 3):
        assert torch.equal(read(tmp_path / str(number))["w"], state_of(number)["w"])


def plan_beside_a_rank_that_is_killed(rank: int, line: Line) -> None:
    folder = line.hear()
    saver = new_saver(timeout=60)
    plan = saver.plan(state_of(1))
    plan.reserve()
    compare(plan)
    staged = plan.stage()
    line.say("staged")
    line.hear()
    (folder / "1").mkdir(exist_ok=True)
    failed = outcome(lambda: staged.write(folder / "1", OPTIONS))
    staged.release()
    line.say(failed[0], time.monotonic())
    line.hear()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_while_plans_are_gathered_is_noticed(tmp_path: Path, killed: int) -> None:
    other = 1 - killed
    with Job(plan_beside_a_rank_that_is_killed, 2, tmp_path) as job:
        job.tell(0, tmp_path)
        job.tell(1, tmp_path)
        job.hear_all()
        if other == 0:
            job.tell(0)
            time.sleep(0.5)
        job.signal(killed, signal.SIGKILL)
        started = time.monotonic()
        if other == 1:
            # A rank that sent its plan need not wait; without the first one the vote fails.
            job.tell(1)
        kind, noticed = job.hear(other)
        assert noticed - started < NOTICED + 0.5
        if other == 0:
            assert kind != ""


def test_a_file_that_finds_no_room_fails_the_save_and_no_later_one(tmp_path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    small, large = {"w": torch.ones(1 << 10)}, {"w": torch.ones(4 << 20)}
    with Checkpointer(tmp_path / "root", on_failure=lambda error: None) as checkpointer:
        checkpointer.save_dcp(1, small, blocking=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            saved = checkpointer.save_dcp(2, large)
            with pytest.raises(OSError, match=r"__0_0\.distcp"):
                saved.result(60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        checkpointer.save_dcp(3, large, blocking=True)
        loaded = {"w": torch.zeros(4 << 20)}
        checkpointer.load_dcp(loaded)
    assert torch.equal(loaded["w"], large["w"])
    assert not (tmp_path / "root" / "dcp-2").exists()
