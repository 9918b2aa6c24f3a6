"""A lazy DCP save copies in the background."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from support.checkpoint.dcp_states import Net, assert_same, read, reserve, save, whole, write

from tundish.checkpoint.copies import EagerCopy
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.dcp.save import DcpSave


def test_a_lazy_save_has_the_values_before_the_optimizer_step(planner: SavePlanner, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(8)), Net().norm)
    model.register_buffer("average", torch.zeros(1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    train()
    for number in range(3):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        expected = whole(state)
        plan = DcpSave(planner, state, staging="lazy", optimizer=optimizer)
        staged = reserve(plan)
        staged.copy()
        with torch.no_grad():
            model.average.fill_(number + 1)
        train()
        write(staged, tmp_path / str(number))
        loaded = read(tmp_path / str(number))
        assert_same(loaded["model"], expected["model"])
        assert_same(loaded["optimizer"]["state"], expected["optimizer"]["state"])


def test_a_lazy_save_copies_optimizer_owned_tensors_in_the_background(
    planner: SavePlanner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(8, 8)
    model.register_buffer("average", torch.zeros(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    copied: dict[bool, int] = {True: 0, False: 0}
    run_copies = EagerCopy.run

    def count(self: EagerCopy) -> None:
        copied[threading.current_thread() is threading.main_thread()] += sum(
            len(block.sources) for block in self._blocks
        )
        run_copies(self)

    monkeypatch.setattr(EagerCopy, "run", count)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(planner, state, tmp_path / "lazy", staging="lazy", optimizer=optimizer)
    # Weight and bias, and four states of each; at once the buffer, which any forward may change.
    assert copied == {True: 1, False: 10}
