"""Changes beside a lazy save: torch counts one when it is made, so one under way as the copy ended counts too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tundish.checkpoint import Checkpointer
from tundish.errors import InvalidInputError

SAVES: dict[str, Callable[..., Any]] = {
    "hf": lambda checkpointer, model, **how: checkpointer.save_hf(1, model, **how),
    "dcp": lambda checkpointer, model, **how: checkpointer.save_dcp(
        1, model.state_dict(keep_vars=True), **how
    ),
}


class Gate:
    """Holds a save up after it was staged, while a test changes the model."""

    def __init__(self) -> None:
        self.staged, self.go_on = threading.Event(), threading.Event()

    def __call__(self, event: str, kind: str, step: int) -> None:
        if event == "staged":
            self.staged.set()
            assert self.go_on.wait(30)


@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize(
    "change", ["none", "unannounced", "after staged()", "by the step", "before the step"]
)
def test_a_change_before_the_step_fails_a_lazy_save(tmp_path: Path, kind: str, change: str) -> None:
    model, gate = torch.nn.Linear(50, 50), Gate()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(50)).sum().backward()
    with Checkpointer(tmp_path / "root", on_failure=lambda error: None, on_event=gate) as checkpointer:
        save = SAVES[kind](checkpointer, model, staging="lazy", optimizer=optimizer)
        assert gate.staged.wait(30)
        if change == "after staged()":
            save.staged(30)
        if change == "by the step":
            optimizer.step()
        elif change != "none":
            with torch.no_grad():
                model.weight.add_(1)
        if change == "before the step":
            optimizer.step()
        gate.go_on.set()
        if change in ("unannounced", "before the step"):
            with pytest.raises(InvalidInputError, match="weight changed while a lazy save"):
                save.result(30)
            assert checkpointer.list() == []
        else:
            assert save.result(30).exists()
