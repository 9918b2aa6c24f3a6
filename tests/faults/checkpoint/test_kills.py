"""Ranks that train and save are killed at random times, again and again, and the next start goes on.

After each kill: every visible checkpoint verifies byte for byte, whatever was said to be published is there or was
pruned by a newer one, the pointers lead to checkpoints, and the next start removes what was left and resumes at the
newest step. `TUNDISH_KILLS` sets how many kills; the times are drawn from a fixed seed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tundish.checkpoint import open_readonly

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))

from rank_processes import Job, Line

KILLS = int(os.environ.get("TUNDISH_KILLS", "30"))
KEPT = 3


def train(rank: int, line: Line) -> None:
    import torch

    from tundish.checkpoint import Checkpointer
    from tundish.errors import NotFoundError

    root = Path(line.hear())
    claims = os.open(root.parent / "claims", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def claim(path: Path) -> None:
        if rank == 0:
            os.write(claims, f"{path.name}\n".encode())

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with Checkpointer(root, keep_last=KEPT, on_failure="raise", on_published=[claim]) as checkpointer:
        state: dict[str, Any] = {"model": model.state_dict(), "step": 0}
        try:
            extra, rank_extras = checkpointer.load_dcp(state)
        except NotFoundError:
            step = 0
        else:
            step = extra["step"]
            assert state["step"] == step
            assert rank_extras == {0: {"rank": 0}, 1: {"rank": 1}}
            checkpointer.discard_after(step)
        model.load_state_dict(state["model"])
        line.say(step)
        while True:
            step += 1
            model(torch.ones(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save_hf(step, dict(model.state_dict()))
            checkpointer.save_dcp(
                step,
                {"model": model.state_dict(), "step": step},
                extra={"step": step},
                rank_extra={"rank": rank},
            )


def steps(names: list[str], kind: str) -> list[int]:
    return [int(name.partition("-")[2]) for name in names if name.startswith(f"{kind}-")]


@pytest.mark.timeout(60 + 20 * KILLS)
def test_whatever_is_killed_the_next_start_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    draw = random.Random(20261121)
    resumed_before = 0
    for _ in range(KILLS):
        with Job(train, 2, tmp_path) as job:
            for rank in (0, 1):
                job.tell(rank, str(root))
            (resumed,), (same,) = job.hear_all()
            assert resumed == same >= resumed_before
            resumed_before = resumed
            assert not [name for name in os.listdir(root) if name.endswith(".incomplete") and "-" not in name]
            time.sleep(draw.uniform(0, 0.6))
            victims = draw.choice([(0,), (1,), (0, 1)])
            for rank in victims:
                job.signal(rank, signal.SIGKILL)
        claimed = (tmp_path / "claims").read_text().splitlines() if (tmp_path / "claims").exists() else []
        readonly = open_readonly(root)
        for kind in ("hf", "dcp"):
            published = readonly.list(kind)
            for checkpoint in published:
                readonly.verify(checkpoint.path)
            there = [checkpoint.step for checkpoint in published]
            if kind == "dcp" and steps(claimed, kind):
                newest = max(steps(claimed, kind))
                assert there, f"dcp-{newest} was published and nothing is there"
                assert there[-1] >= newest
            pointer = root / f"{kind}-latest"
            if pointer.is_symlink():
                assert pointer.exists(), f"{kind}-latest points to nothing"
    assert resumed_before > 0
