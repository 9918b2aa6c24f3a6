"""No save and no error is lost: dropped checkpointers, nested calls, callers that stop waiting."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed.programs import run

from tundish.checkpoint import Checkpointer, open_readonly
from tundish.checkpoint.root import Checkpoint
from tundish.errors import InvalidInputError

TENSORS = {"w": torch.ones(1000)}


def saved_by(script: str, root: Path) -> subprocess.CompletedProcess[str]:
    return run(["-c", textwrap.dedent(script), root])


def test_a_save_of_a_function_that_returned_is_finished_before_the_interpreter_ends(tmp_path: Path) -> None:
    script = """
        import sys, time, torch, tundish as td

        def main():
            checkpointer = td.Checkpointer(sys.argv[1], on_event=lambda *event: time.sleep(0.2))
            checkpointer.save_hf(1, {"w": torch.ones(1000)})

        main()
    """
    ended = saved_by(script, tmp_path / "root")
    assert ended.returncode == 0, ended.stderr
    reader = open_readonly(tmp_path / "root")
    assert reader.latest("hf") == tmp_path / "root" / "hf-1"
    reader.verify(tmp_path / "root" / "hf-1")


def test_a_root_whose_checkpointer_was_dropped_opens_again(tmp_path: Path) -> None:
    go_on = threading.Event()
    checkpointer = Checkpointer(
        tmp_path / "root", on_failure="raise", on_event=lambda event, *_: event != "written" or go_on.wait(30)
    )
    save = checkpointer.save_hf(1, TENSORS)
    del checkpointer
    gc.collect()
    assert not save.done()
    go_on.set()
    with Checkpointer(tmp_path / "root", on_failure="raise") as again:
        assert save.result(30) == again.latest("hf")


@pytest.mark.parametrize("wakes_the_caller", [True, False])
def test_a_failure_is_acted_on_when_its_caller_was_interrupted(
    wakes_the_caller: bool, tmp_path: Path
) -> None:
    """Also where the signal does not end the wait, and the caller hears of it only once the save has failed."""
    root = tmp_path / "root"
    told: list[BaseException] = []
    go_on = threading.Event()

    def interrupt(event: str, kind: str, step: int) -> None:
        if event == "staged":
            if wakes_the_caller:
                os.kill(os.getpid(), signal.SIGINT)
                assert go_on.wait(30)
            else:
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            shutil.rmtree(root / f".{kind}-{step}.incomplete")

    with Checkpointer(root, on_failure=told.append, on_event=interrupt) as checkpointer:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save_hf(1, TENSORS, blocking=True)
        go_on.set()
        checkpointer.wait(30)
    assert len(told) == 1 and isinstance(told[0], OSError)


CALLS: dict[str, Callable[[Checkpointer], Any]] = {
    "save_hf": lambda checkpointer: checkpointer.save_hf(9, TENSORS),
    "save_dcp": lambda checkpointer: checkpointer.save_dcp(9, TENSORS),
    "load_dcp": lambda checkpointer: checkpointer.load_dcp({}),
    "discard_after": lambda checkpointer: checkpointer.discard_after(0),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_call_is_made_inside_a_save(tmp_path: Path, call: str) -> None:
    """As a handler of a signal makes it that comes in the middle of a save."""
    told: list[InvalidInputError] = []

    def to_hf(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        with pytest.raises(InvalidInputError, match=r"inside save_hf\(\)") as caught:
            CALLS[call](checkpointer)
        told.append(caught.value)
        return [(name, tensor)]

    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, TENSORS, to_hf=to_hf).result(30)
        checkpointer.save_hf(2, TENSORS).result(30)
        assert [found.step for found in checkpointer.list()] == [1, 2]
    assert told


def test_calls_of_two_threads_that_overlap_leave_neither_thread_inside_one(tmp_path: Path) -> None:
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    def first(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if not first_is_in.is_set():
            first_is_in.set()
            assert second_is_in.wait(30)
        return [(name, tensor)]

    class Late(dict[str, torch.Tensor]):
        def items(self) -> Any:
            second_is_in.set()
            assert first_is_out.wait(30)
            return super().items()

    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        other = threading.Thread(
            target=lambda: first_is_in.wait(30) and checkpointer.save_dcp(1, Late(TENSORS))
        )
        other.start()
        checkpointer.save_hf(1, TENSORS, to_hf=first)
        first_is_out.set()
        other.join()
        checkpointer.save_hf(2, TENSORS).result(30)


def test_integers_of_numpy_are_steps(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save_hf(np.int64(3), TENSORS).result(30)
        checkpointer.save_dcp(np.uint8(4), TENSORS).result(30)
        checkpointer.load_dcp({"w": torch.zeros(1000)}, np.int32(4))
        checkpointer.protect(np.int64(3))
        with checkpointer.reading(np.int64(3)) as path:
            assert path.name == "hf-3"
        found: list[Checkpoint] = checkpointer.list()
        assert [type(one.step) for one in found] == [int, int]
        for wrong in (np.float64(5), np.bool_(True), True, "5", -1):
            with pytest.raises(InvalidInputError, match="step is"):
                checkpointer.save_hf(wrong, TENSORS)  # type: ignore[arg-type]


def test_tied_names_of_a_mapping_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensor = torch.ones(3)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        for step in (1, 2):
            checkpointer.save_hf(step, {"model.w": tensor, "average.w": tensor}).result(30)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "model.w, average.w" in told[0]


def contains_itself() -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(3)}
    state["again"] = state
    return state


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (contains_itself(), "contain itself"),
        ({"w": torch.nn.UninitializedParameter()}, "uninitialized"),
    ],
)
def test_states_that_cannot_be_saved_are_refused_at_once(
    tmp_path: Path, state: dict[str, Any], said: str
) -> None:
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        with pytest.raises(InvalidInputError, match=said):
            checkpointer.save_dcp(1, state)
        checkpointer.save_dcp(2, TENSORS).result(30)
