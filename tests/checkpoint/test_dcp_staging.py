"""How the files of a DCP checkpoint get their bytes: in the background,."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from dcp_worlds import Net, assert_same, compare, read, save, whole, write
from tundish.checkpoint.dcp.saver import DcpSaver
from tundish.checkpoint.staging.copies import EagerCopy


def test_a_lazy_save_holds_what_was_before_the_optimizers_step(saver: DcpSaver, tmp_path: Path) -> None:
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
        plan = saver.plan(state, staging="lazy", optimizer=optimizer)
        plan.reserve()
        compare(plan)
        staged = plan.stage()
        with torch.no_grad():
            model.average.fill_(number + 1)
        train()
        write(staged, tmp_path / str(number))
        loaded = read(tmp_path / str(number))
        assert_same(loaded["model"], expected["model"])
        assert_same(loaded["optimizer"]["state"], expected["optimizer"]["state"])


def test_a_lazy_save_copies_in_the_background_what_the_step_alone_changes(
    saver: DcpSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    save(saver, state, tmp_path / "lazy", staging="lazy", optimizer=optimizer)
    # Weight and bias, and four states of each; at once the buffer, which any forward may change.
    assert copied == {True: 1, False: 10}
