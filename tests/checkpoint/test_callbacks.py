"""Callbacks of a save may call some methods of their checkpointer."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tundish.checkpoint import Checkpoint, Checkpointer, open_readonly
from tundish.errors import InvalidInputError

TENSORS = {"weight": torch.ones(10)}


def test_they_protect_also_while_the_checkpointer_is_closed(tmp_path: Path) -> None:
    def keep(one: Checkpoint) -> bool:
        checkpointer.protect(one.step)
        return False

    def on_published(path: Path) -> None:
        closing.wait(60)
        checkpointer.protect(int(path.name.removeprefix("hf-")))

    closing = threading.Event()
    root = tmp_path / "root"
    checkpointer = Checkpointer(root, on_failure="raise", keep_last=1, keep=keep, on_published=[on_published])
    saves = [checkpointer.save_hf(step, TENSORS) for step in (1, 2)]
    closer = threading.Thread(target=checkpointer.close)
    closer.start()
    with contextlib.suppress(InvalidInputError):
        while True:
            checkpointer.protect(1)
    closing.set()
    assert [save.result(60).name for save in saves] == ["hf-1", "hf-2"]
    closer.join(60)
    assert [one.step for one in open_readonly(root).list()] == [1, 2]


def test_callbacks_leave_the_failure_of_another_save_to_the_training_thread(tmp_path: Path) -> None:
    root = tmp_path / "root"
    failed = threading.Event()

    def on_event(event: str, kind: str, step: int) -> None:
        if event == "staged" and kind == "dcp":
            shutil.rmtree(root / f".dcp-{step}.incomplete")
        elif event == "staged":
            failed.wait(60)

    def on_published(path: Path) -> None:
        assert checkpointer.latest() == path
        checkpointer.protect(5)

    with Checkpointer(
        root, on_failure="raise", on_event=on_event, on_published=[on_published]
    ) as checkpointer:
        exported = checkpointer.save_hf(5, TENSORS)
        saved = checkpointer.save_dcp(5, TENSORS)
        with pytest.raises(OSError, match="dcp-5"):
            saved.result(60)
        failed.set()
        exported.result(60)
        with pytest.raises(OSError, match="dcp-5"):
            checkpointer.wait(60)


class _Slow:
    """A root whose removals wait until they are let go."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.began, self.let_go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._root, name)

    def remove(self, name: str) -> None:
        self.began.set()
        assert self.let_go.wait(60)
        self._root.remove(name)


def test_protect_waits_for_no_removal(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, on_failure="raise") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save_hf(step, {"w": torch.ones(1)}, blocking=True)
    with Checkpointer(tmp_path, on_failure="raise", keep_last=1) as checkpointer:
        owner = checkpointer._session.writable
        assert owner is not None
        owner.root = slow = _Slow(owner.root)  # type: ignore[assignment]
        try:
            save = checkpointer.save_hf(4, {"w": torch.ones(1)})
            assert slow.began.wait(60)
            protecting = threading.Thread(target=checkpointer.protect, args=(2,))
            protecting.start()
            protecting.join(10)
            assert not protecting.is_alive()
            # Nor does a save of the other kind.
            checkpointer.save_dcp(4, {"w": torch.ones(1)}).result(10)
        finally:
            slow.let_go.set()
        save.result(60)
        assert [one.step for one in checkpointer.list("hf")] == [2, 4]


def test_a_checkpoint_protected_before_its_removal_stays(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, on_failure="raise") as checkpointer:
        for step in (1, 2):
            checkpointer.save_hf(step, {"w": torch.ones(1)}, blocking=True)
    with Checkpointer(tmp_path, on_failure="raise", keep_last=1) as checkpointer:
        owner = checkpointer._session.writable
        assert owner is not None
        owner.root = slow = _Slow(owner.root)  # type: ignore[assignment]
        try:
            save = checkpointer.save_hf(3, {"w": torch.ones(1)})
            # It is chosen to go, and is still there.
            assert slow.began.wait(60)
            checkpointer.protect(1)
        finally:
            slow.let_go.set()
        save.result(60)
        assert [one.step for one in checkpointer.list("hf")] == [1, 3]
