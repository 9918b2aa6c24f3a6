"""A failed save leaves the checkpointer usable, and waiting for one save waits for no other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tundish.checkpoint import Checkpointer
from tundish.errors import CallbackError

TENSORS = {"w": torch.ones(1000)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def fail_at_writing(checkpointer: Checkpointer, root: Path, step: int) -> None:
    """A save whose folder somebody takes away before it is written."""
    save = checkpointer.save_hf(step, TENSORS)
    (root / f".hf-{step}.incomplete").rename(root / f"elsewhere-{step}")
    with pytest.raises(Exception, match=f"hf-{step}"):
        save.result(60)


def test_the_failure_policy_acts_before_leftovers_are_removed(root: Path) -> None:
    heard = threading.Event()
    was_heard: list[bool] = []
    with Checkpointer(root, on_failure=lambda _: heard.set()) as checkpointer:
        owner: Any = checkpointer._session.root
        abort = owner.abort

        def abort_slowly(*given: Any) -> None:
            # As on a file system that hangs.
            was_heard.append(heard.wait(20))
            abort(*given)

        owner.abort = abort_slowly
        fail_at_writing(checkpointer, root, 5)
        del owner.abort
        assert was_heard == [True]
        assert checkpointer.save_hf(6, TENSORS).result(60) == root / "hf-6"


class Broken(logging.Handler):
    """A log that cannot be written, and whose author let that be everybody's business."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(28, "no space left for the log")


@pytest.fixture
def broken_log() -> Iterator[None]:
    handler, logger = Broken(level=logging.ERROR), logging.getLogger("tundish.checkpoint")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.mark.usefixtures("broken_log")
def test_a_log_that_cannot_be_written_ends_no_save_but_the_failed_one(root: Path) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bug of the user's")

    published = [fail]
    with Checkpointer(root, on_failure=fail, on_published=published) as checkpointer:
        with pytest.raises(CallbackError, match="a bug of the user's"):
            checkpointer.save_hf(1, TENSORS).result(60)
        fail_at_writing(checkpointer, root, 2)
        with pytest.raises(CallbackError):
            checkpointer.save_hf(3, TENSORS).result(60)


@pytest.mark.parametrize("kind", ["hf", "dcp"])
@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
def test_staged_waits_for_no_other_save(root: Path, kind: str, is_lazy: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000))
    lazily: dict[str, Any] = {"staging": "lazy", "optimizer": torch.optim.SGD([parameter])} if is_lazy else {}
    go_on = threading.Event()

    def hold(event: str, _: str, step: int) -> None:
        if (event, step) == ("written", 1):
            assert go_on.wait(60)

    with Checkpointer(root, on_event=hold, on_failure="raise") as checkpointer:
        save: Any = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        first = save(1, {"w": parameter})
        second = save(2, {"w": parameter}, **lazily)
        second.staged(20)
        with torch.no_grad():
            parameter.add_(1)
        assert not first.done()
        go_on.set()
        second.result(60)
        loaded = {"w": torch.ones(1000)}
        if kind == "dcp":
            checkpointer.load_dcp(loaded)
        else:
            from safetensors.torch import load_file

            loaded = load_file(root / "hf-2" / "model.safetensors")
    assert loaded["w"].eq(0).all()


@pytest.mark.parametrize("is_of_copy", [True, False], ids=["copy", "finalize"])
def test_a_thread_that_cannot_be_started_fails_the_save_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_of_copy: bool
) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([parameter], 0.1)
    parameter.grad = torch.ones(1000)
    start = threading.Thread.start
    refused = "tundish-lazy-copy" if is_of_copy else "tundish-hf-finalize"

    def refuse(self: threading.Thread) -> None:
        if self.name == refused:
            raise RuntimeError("can't start new thread")
        start(self)

    with Checkpointer(root, on_failure="raise") as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="start new thread"):
                checkpointer.save_hf(1, {"w": parameter}, staging="lazy", optimizer=optimizer)
        optimizer.step()
        checkpointer.wait(60)
        stats = checkpointer.stats()
        assert stats["hf_saves_under_way"] == stats["dcp_saves_under_way"] == 0
        assert checkpointer.stats()["staging_in_use_bytes"] == 0
        assert checkpointer.save_hf(2, {"w": parameter}).result(60) == root / "hf-2"
    assert not list(root.glob("*hf-1*"))
