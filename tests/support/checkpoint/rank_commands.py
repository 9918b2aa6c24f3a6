"""Ranks that open, save and close on command, and report the outcome.

A test sends all ranks the same command with `each`, and one of them another with `Job.tell`. The step alone determines
the tensors that a rank saves: `assert_saved` compares them.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import torch

from support.checkpoint import failpoints as failpoints
from support.distributed.rank_processes import Job, Line, outcome
from support.waiting import PATIENCE

MIB = 1 << 20
SAVED_BYTES = 4 * MIB
_CAPABILITY_VERSION_3 = 0x20080522


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Two files in an export, one for each of two ranks; as large in all as `SAVED_BYTES`."""
    return {name: torch.full((MIB // 2,), step + part) for part, name in ((0.0, "a"), (0.5, "b"))}


class _Rank:
    """The orders are its methods; each returns what is said."""

    def __init__(self) -> None:
        self._checkpointer: Any = None
        self._saves: dict[tuple[str, int], Any] = {}
        self._held_at: tuple[str, str, int] | None = None
        self._is_held = threading.Event()
        self._let_go = threading.Event()
        self.failures: list[str] = []

    def give_up_power(self) -> None:
        """From here on permissions hold for this thread, and those it starts, even if the user is root."""
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        none = (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:
            raise OSError(ctypes.get_errno(), "cannot give up capabilities")

    def open(self, root: Path, **arguments: Any) -> Any:
        from tundish.checkpoint import Checkpointer

        def open_it() -> None:
            self._checkpointer = Checkpointer(
                root,
                on_failure=lambda error: self.failures.append(repr(error)),
                on_event=self._hold,
                **{"timeout": PATIENCE, **arguments},
            )

        return outcome(open_it)

    def arm(self, setting: dict[str, str]) -> None:
        failpoints.arm(setting)

    def save(self, kind: str, step: int) -> Any:
        """The call alone."""

        def call() -> None:
            self._saves[kind, step] = self._begin(kind, step)

        return outcome(call)

    def again(self, kind: str, step: int) -> Any:
        """A call that is to be refused."""
        return outcome(lambda: self._begin(kind, step))

    def _begin(self, kind: str, step: int) -> Any:
        if kind == "hf":
            return self._checkpointer.save_hf(step, tensors(step), shard_bytes=SAVED_BYTES // 2 + 4096)
        return self._checkpointer.save_dcp(step, tensors(step))

    def result(self, kind: str, step: int) -> Any:
        return outcome(lambda: self._saves[kind, step].result(PATIENCE))

    def hold(self, event: str, kind: str, step: int) -> None:
        """Stop the finalize thread at an event, until it is let go."""
        self._held_at = (event, kind, step)
        self._is_held.clear()
        self._let_go.clear()

    def wait_until_held(self) -> bool:
        return self._is_held.wait(PATIENCE)

    def let_go(self) -> None:
        self._held_at = None
        self._let_go.set()

    def limit_files(self, size: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def unlimit_files(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def protect(self, step: int) -> Any:
        return outcome(lambda: self._checkpointer.protect(step))

    def close(self) -> Any:
        return outcome(self._checkpointer.close)

    def staged_bytes(self) -> int:
        from tundish._native import staging_stats

        return staging_stats()["in_use"]

    def failed(self) -> list[str]:
        """The errors that the failure policy got since the last call."""
        failures, self.failures = self.failures, []
        return failures

    def _hold(self, *event: Any) -> None:
        if event == self._held_at:
            self._is_held.set()
            assert self._let_go.wait(PATIENCE)


def obey(rank: int, line: Line) -> None:
    this = _Rank()
    while (order := line.hear()) is not None:
        name, arguments, named = order
        line.say(getattr(this, name)(*arguments, **named))


def tell(job: Job, rank: int, name: str, *arguments: Any, **named: Any) -> None:
    job.tell(rank, (name, arguments, named))


def answer(job: Job, rank: int) -> Any:
    (said,) = job.hear(rank)
    return said


def each(job: Job, name: str, *arguments: Any, **named: Any) -> list[Any]:
    """Tell all ranks, and hear what they say."""
    for rank in range(job.size):
        tell(job, rank, name, *arguments, **named)
    return [answer(job, rank) for rank in range(job.size)]


FINE = ("", "", None)


def assert_fine(answers: list[Any]) -> None:
    assert answers == [FINE] * len(answers)


def save(job: Job, kind: str, step: int) -> None:
    """A save that has to succeed."""
    assert_fine(each(job, "save", kind, step))
    assert_fine(each(job, "result", kind, step))


def begin_and_hold(job: Job, kind: str, step: int, *, event: str = "staged") -> None:
    """A save that stands still on all ranks, staged and not yet written."""
    each(job, "hold", event, kind, step)
    assert_fine(each(job, "save", kind, step))
    assert each(job, "wait_until_held") == [True] * job.size


def end(job: Job) -> None:
    assert each(job, "staged_bytes") == [0] * job.size
    job.tell_all()
    job.expect_end()


def assert_saved(root: Path, expected: dict[str, list[int]]) -> None:
    """The published steps of each kind are those, and hold what was saved, bit by bit."""
    from safetensors.torch import load_file

    from tundish.checkpoint import load_dcp, open_readonly

    readonly = open_readonly(root)
    found: dict[str, list[int]] = {}
    for checkpoint in readonly.list():
        found.setdefault(checkpoint.kind, []).append(checkpoint.step)
        readonly.verify(checkpoint.path)
        state = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
        if checkpoint.kind == "hf":
            files = list(checkpoint.path.glob("*.safetensors"))
            assert len(files) == 2
            state = {name: tensor for file in files for name, tensor in load_file(file).items()}
        else:
            load_dcp(state, checkpoint.path)
        for name, tensor in tensors(checkpoint.step).items():
            assert torch.equal(state[name], tensor), (checkpoint.path.name, name)
        assert os.readlink(
            root / f"{checkpoint.kind}-latest"
        ) == f"{checkpoint.kind}-{found[checkpoint.kind][-1]}" or (
            checkpoint.step < max(expected[checkpoint.kind])
        )
    assert found == expected
