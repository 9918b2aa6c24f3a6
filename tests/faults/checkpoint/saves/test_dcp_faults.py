"""DCP saves while ranks are stopped or killed, and on a full disk."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed.rank_processes import Job, Line, outcome
from support.waiting import NOTICED
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tundish.checkpoint import Checkpointer
from tundish.checkpoint.dcp.plan import SavePlanner


def read(folder: Path) -> Any:
    target = folder.with_name(f"{folder.name}.pt")
    dcp_to_torch_save(folder, target)
    return torch.load(target)


def state_of(number: int) -> dict[str, Any]:
    # Another form each time, so that plans have to travel.
    return {"w": torch.full((1000,), float(number)), f"of {number}": torch.ones(3)}


def save_beside_a_rank_that_stands_still(rank: int, line: Line) -> None:
    root, timeout = line.hear()
    with Checkpointer(root, on_failure="raise", timeout=timeout) as checkpointer:
        checkpointer.save_dcp(0, state_of(0), blocking=True)
        plan = SavePlanner.plan

        def stand_still(*given: Any) -> Any:
            SavePlanner.plan = plan  # type: ignore[method-assign]
            line.say("planning")
            line.hear()
            return plan(*given)

        if rank == 1:
            SavePlanner.plan = stand_still  # type: ignore[method-assign]
        line.say(outcome(lambda: checkpointer.save_dcp(1, state_of(1))), time.monotonic())
        line.hear()
        for number in (2, 3):
            checkpointer.save_dcp(number, state_of(number), blocking=True)


def test_a_rank_that_is_stopped_while_all_plan_spoils_one_save(tmp_path: Path) -> None:
    with Job(save_beside_a_rank_that_stands_still, 2, tmp_path) as job:
        job.tell_all((tmp_path / "root", 3.0))
        assert job.hear(1) == ("planning",)
        job.signal(1, signal.SIGSTOP)
        ((kind, text, silent), _) = job.hear(0)
        assert (kind, silent) == ("VoteTimeoutError", (1,)), text
        job.signal(1, signal.SIGCONT)
        job.tell(1)
        assert job.hear(1)[0][0] == "VoteTimeoutError"
        job.tell_all()
        job.expect_end()
    for number in (0, 2, 3):
        assert torch.equal(read(tmp_path / "root" / f"dcp-{number}")["w"], state_of(number)["w"])
    assert not (tmp_path / "root" / "dcp-1").exists()


def test_a_rank_that_is_killed_while_all_plan_is_noticed(tmp_path: Path) -> None:
    with Job(save_beside_a_rank_that_stands_still, 2, tmp_path) as job:
        job.tell_all((tmp_path / "root", 60.0))
        assert job.hear(1) == ("planning",)
        time.sleep(0.5)
        job.signal(1, signal.SIGKILL)
        killed = time.monotonic()
        ((kind, text, who), noticed) = job.hear(0)
        assert (kind, who) == ("PeerFailedError", 1), text
        assert noticed - killed < NOTICED


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
