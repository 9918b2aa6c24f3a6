"""How the files of a DCP checkpoint get their bytes: in the background, and through a limit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed.rank_processes import Line

import dcp_worlds
from dcp_worlds import Net, assert_same, compare, hear_news, new_saver, read, run, save, whole, write
from tundish._native import staging_stats, verify_checkpoint
from tundish.checkpoint.dcp.saver import DcpSaver
from tundish.checkpoint.staging.copies import Copies


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
    run_copies = Copies.run

    def count(self: Copies) -> None:
        copied[threading.current_thread() is threading.main_thread()] += sum(
            len(block.sources) for block in self._blocks
        )
        run_copies(self)

    monkeypatch.setattr(Copies, "run", count)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(saver, state, tmp_path / "lazy", staging="lazy", optimizer=optimizer)
    # Weight and bias, and four states of each; at once the buffer, which any forward may change.
    assert copied == {True: 1, False: 10}


LARGE = 8 << 20


def save_through(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    saver = new_saver()
    # Tensors of many sizes, one of them larger than the limit; rank 0 alone goes through.
    state: dict[str, Any] = {f"w{number}": torch.randn(number * 997) for number in range(120)}
    state |= {
        "large": torch.randn(LARGE // 4),
        "half": torch.randn(70001).to(torch.bfloat16),
        "last": list(range(9999)),
    }
    state |= {
        f"own{rank}": torch.full((3, 5), float(rank)),
        "scalars": {str(n): torch.tensor(n) for n in range(50)},
    }
    expected = whole(state)
    saved = []
    for number, limit in enumerate((1 << 20, 50_000, 5000)):
        plan = saver.plan(state, extra={"n": number})
        target = folder / str(number)
        if rank == 0:
            target.mkdir()
            hear_news(plan)
            plan.compare()
            staged = plan.write_through(target, dcp_worlds.OPTIONS, limit)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        else:
            plan.reserve()
            compare(plan)
            staged = plan.stage()
        write(staged, target)
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                state[name].copy_(value)
        saved.append(staging_stats()["peak"])
    if rank == 0:
        torch.save(expected, folder / "expected")
    saver.close()
    line.say(saved)


def test_a_file_larger_than_the_limit_is_written_through(tmp_path: Path) -> None:
    (peaks,), _ = run(save_through, 2, tmp_path, tmp_path)
    # The large tensor takes its size twice at most, whatever the limit; the file of rank 0 is larger.
    assert max(peaks) < 1.1 * LARGE + (1 << 20) * 1.5
    expected = torch.load(tmp_path / "expected") | {"own1": torch.ones(3, 5)}
    for number in range(3):
        verify_checkpoint(tmp_path / str(number))
        assert_same(read(tmp_path / str(number)), expected)
