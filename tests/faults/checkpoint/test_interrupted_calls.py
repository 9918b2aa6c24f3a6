"""Ctrl-C at any moment of handing a save over, or a second one while what was taken is given back: nothing is lost."""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, Self

import pytest
import torch

from tundish._native import staging_stats
from tundish.checkpoint import Checkpointer
from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.dcp.plan import DcpPlan
from tundish.checkpoint.hf.images import FileImage
from tundish.checkpoint.hf.plan import HfPlan
from tundish.checkpoint.lane import Lane
from tundish.checkpoint.staging import begin_copies

TENSORS = {"w": torch.ones(1000)}


class CtrlC:
    """Raises `KeyboardInterrupt` once on this thread, at the `number`th moment in `functions` at which it can come.

    The interpreter looks for signals when a function begins, after each call, and where a loop begins again.
    """

    def __init__(self, number: int, *functions: Callable[..., Any]) -> None:
        self._left = number
        self._codes: set[CodeType] = {function.__code__ for function in functions}
        self._was_look = False
        self.came = False

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code not in self._codes:
            return None
        frame.f_trace_opcodes = True
        self._was_look = False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._left -= self._was_look
            if self._left < 0:
                self.came = True
                raise KeyboardInterrupt
            step = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self._was_look = step.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
        return self._step

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)


@pytest.fixture
def told() -> list[BaseException]:
    return []


@pytest.fixture
def checkpointer(told: list[BaseException], tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "root", keep_last=1, on_failure=told.append) as one:
        yield one


def test_a_save_that_is_interrupted_while_it_is_handed_over_goes_on(
    checkpointer: Checkpointer, told: list[BaseException]
) -> None:
    for number in itertools.count():
        ctrl_c = CtrlC(number, Lane.submit)
        with contextlib.suppress(KeyboardInterrupt), ctrl_c:
            checkpointer.save_hf(number, TENSORS)
        checkpointer.wait(10)
        assert checkpointer.latest("hf") == checkpointer.path / f"hf-{number}", number
        assert checkpointer.stats()["staging"]["in_use"] == 0
        assert not told
        if not ctrl_c.came:
            break
    assert number > 1


RELEASES = {"hf": (HfPlan.release, Buffer.release), "dcp": (DcpPlan.release, Buffer.release)}


@pytest.mark.parametrize("kind", RELEASES)
def test_a_second_ctrl_c_while_a_save_gives_back_what_it_took_costs_nothing(
    kind: str, checkpointer: Checkpointer, told: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_pressed = False

    def copies(*given: Any) -> Any:
        if is_pressed:
            raise KeyboardInterrupt
        return begin_copies(*given)

    monkeypatch.setattr(f"tundish.checkpoint.{kind}.plan.begin_copies", copies)
    save = getattr(checkpointer, f"save_{kind}")
    for number in itertools.count():
        is_pressed = True
        again = CtrlC(number, *RELEASES[kind])
        with pytest.raises(KeyboardInterrupt), again:
            save(number, TENSORS)
        checkpointer.wait(10)
        assert checkpointer.stats()["staging"]["in_use"] == staging_stats()["in_use"] == 0, number
        # Who pressed it was told by it.
        assert not told
        is_pressed = False
        assert save(number, TENSORS).result(10) == checkpointer.path / f"{kind}-{number}"
        if not again.came:
            break
    assert number > 1


RESERVATIONS = {
    "hf": (HfPlan.reserve, FileImage.__init__, Buffer.__init__),
    "dcp": (DcpPlan.reserve, Buffer.__init__),
}


@pytest.mark.parametrize("kind", RESERVATIONS)
def test_a_save_that_is_interrupted_while_it_takes_memory_leaves_none_taken(
    kind: Literal["hf", "dcp"], checkpointer: Checkpointer, told: list[BaseException]
) -> None:
    # In a training loop the collector may not come by for long.
    gc.disable()
    try:
        for number in itertools.count():
            ctrl_c = CtrlC(number, *RESERVATIONS[kind])
            with contextlib.suppress(KeyboardInterrupt), ctrl_c:
                getattr(checkpointer, f"save_{kind}")(number, TENSORS)
            checkpointer.wait(10)
            assert checkpointer.stats()["staging"]["in_use"] == staging_stats()["in_use"] == 0, number
            assert not told
            if not ctrl_c.came:
                break
    finally:
        gc.enable()
    assert number > 1
    assert checkpointer.latest(kind) == checkpointer.path / f"{kind}-{number}"
