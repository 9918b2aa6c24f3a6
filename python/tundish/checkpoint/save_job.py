"""A save from the call to its end: `Save`, the future that the caller holds, and `SaveJob`, the work behind it.

Invariant: one thread at a time owns a job: the caller's until it is queued, then the queue's.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from tundish.checkpoint.root import Checkpoint, Kind, name_of
from tundish.checkpoint.staging import Staged
from tundish.checkpoint.write_plan import SavePlan
from tundish.errors import InvalidInputError, InvalidTypeError, TimedOutError

_logger = logging.getLogger("tundish.checkpoint")

_LONGEST_WAIT_SECONDS = 0.25


class Save(Future[Path]):
    """A save under way: a `concurrent.futures.Future` of the published path.

    It cannot be cancelled. In a callback of a save of the same kind `result` and `exception` raise `InvalidInputError`,
    since they would wait for themselves.

    Attributes:
        kind: "hf" or "dcp".
        step: the step that is saved.
        export: the save of the export that `Checkpointer.save(hf=…)` began with this one; None without.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> with td.Checkpointer("saves") as checkpointer:
        ...     save = checkpointer.save_hf(1, {"w": torch.ones(2)})
        ...     save.staged()  # the tensors are in host memory: change them as you like
        ...     save.result(timeout=60).name
        'hf-1'
    """

    def __init__(self, kind: str, step: int, file_bytes: int, *, is_queue_thread: Callable[[], bool]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.kind = kind
        self.step = step
        self.export: Save | None = None
        self._is_queue_thread = is_queue_thread
        self._total = file_bytes
        self._written: Callable[[], int] = lambda: 0
        # Set by the checkpointer: None before staging began and once the save is over; whether all is in host memory.
        self._staged_save: Staged | None = None
        self._was_staged = False

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the published path.

        Args:
            timeout: seconds to wait; None waits without end.

        Returns:
            The path of the published checkpoint.

        Raises:
            TimeoutError: the save is not over in time.
            InvalidInputError: the call would wait for itself.
            InvalidTypeError: `timeout` is no number.
            Exception: the error of the save, the same on every rank.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("results") as checkpointer:
            ...     checkpointer.save_hf(1, {"w": torch.ones(2)}).result(timeout=60).name
            'hf-1'
        """
        self._refuse_deadlock("result")
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error of the save.

        Args:
            timeout: seconds to wait; None waits without end.

        Returns:
            The error, the same on every rank; None if the save succeeded.

        Raises:
            TimeoutError: the save is not over in time.
            InvalidInputError: the call would wait for itself.
            InvalidTypeError: `timeout` is no number.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("exceptions") as checkpointer:
            ...     print(checkpointer.save_hf(1, {"w": torch.ones(2)}).exception())
            None
        """
        self._refuse_deadlock("exception")
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        """Wait until the save is over or `timeout` seconds have passed.

        The wait is cut into short ones: a signal that another thread receives does not end a wait of the main thread.
        """
        check_wait(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done() and (left := deadline - time.monotonic()) > 0:
            wait([self], min(left, _LONGEST_WAIT_SECONDS))

    def staged(self, timeout: float | None = None) -> None:
        """Wait until host memory holds everything that this rank saves, whether or not an earlier save is over.

        Args:
            timeout: seconds to wait; None waits without end.

        Raises:
            TimedOutError: not everything is copied in time.
            InvalidTypeError: `timeout` is no number.
            Exception: the error of staging.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> weight = torch.ones(2)
            >>> with td.Checkpointer("staged") as checkpointer:
            ...     save = checkpointer.save_hf(1, {"w": weight})
            ...     save.staged()
            ...     _ = weight.zero_()  # the save holds the ones
        """
        check_wait(timeout)
        staged = self._staged_save
        if staged is None:
            if not self._was_staged:
                self.result()
            return
        try:
            staged.wait_staged(timeout)
        except TimedOutError as error:
            raise TimedOutError(
                f"step {self.step} ({self.kind}) was not staged within {timeout} s"
            ) from error
        staged.allow_changes()

    def progress(self) -> tuple[int, int]:
        """Report how much this rank has written.

        Returns:
            The bytes of tensors that are written so far, and those that this rank writes in all.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("progress") as checkpointer:
            ...     save = checkpointer.save_hf(1, {"w": torch.ones(2)})
            >>> written, total = save.progress()
            >>> written == total
            True
        """
        is_published = self.done() and self.exception() is None
        return (self._total if is_published else self._written()), self._total

    def __repr__(self) -> str:
        name = name_of(self.kind, self.step)
        if not self.done():
            return f"<Save {name}: {self._written():,} of {self._total:,} bytes of this rank written>"
        error = super().exception(0)
        return f"<Save {name}: {'published' if error is None else f'failed with {type(error).__name__}'}>"

    def _refuse_deadlock(self, call: str) -> None:
        if self._is_queue_thread() and not self.done():
            raise waits_for_itself(call)

    # Only the checkpointer calls the methods below.

    def _set_progress(self, written: Callable[[], int]) -> None:
        """Set the function that returns how many bytes are written."""
        self._written = written

    def _finish(self, path: Path) -> None:
        """Resolve the future: the checkpoint is published and recorded."""
        self._staged_save = None
        self.set_result(path)

    def _fail(self, error: BaseException) -> None:
        """Resolve the future: the save failed, or a callback after publication did."""
        self._staged_save = None
        self.set_exception(error)


class SaveState(enum.Enum):
    """How far a save has come on this rank."""

    PLANNED = enum.auto()
    TAKEN = enum.auto()
    STAGED = enum.auto()
    PUBLISHED = enum.auto()


@dataclass(kw_only=True, eq=False)
class SaveJob:
    """One save of one rank.

    Attributes:
        kind: "hf" or "dcp".
        step: the step.
        tag: for retention.
        overwrite: whether a published checkpoint of this step may be replaced.
        blocking: whether the caller waits for the end.
        call: the method that the caller called.
        make_plan: looks at the tensors and refuses what cannot be saved.
        extra: of the manifest.
        state: how far it has come.
        plan: of the save, once it is made.
        staged: the staged save, or the error that staging failed with on this rank.
        future: what the caller holds, once it is taken.
        number: of the vote that took it; the same on all ranks, and higher than that of any save before.
        wanted: the checkpoint that the first rank began; None on the others.
        needs_room: whether old checkpoints have to go before anything is written; known to the first rank.
        caller_raises: whether the caller's thread raises the error. Then the failure policy does not act.
        started: when the call began, by the monotonic clock.
        held_seconds: how long it held up the caller until the save was queued.
        memory: gives back the host memory and its part of the staging budget; closed when the save is over.
    """

    kind: Kind
    step: int
    tag: str | None
    overwrite: bool
    blocking: bool
    call: str
    make_plan: Callable[[], SavePlan]
    extra: Mapping[str, Any] | None = None
    state: SaveState = SaveState.PLANNED
    plan: SavePlan | None = None
    staged: Staged | BaseException | None = None
    future: Save | None = None
    number: int = -1
    wanted: Checkpoint | None = None
    needs_room: bool = False
    caller_raises: bool = False
    started: float = field(default_factory=time.monotonic)
    held_seconds: float = 0.0
    memory: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def what(self) -> str:
        """The save, for messages."""
        return f"save_{self.kind} of step {self.step}"

    @property
    def name(self) -> str:
        """Of the checkpoint in the root."""
        return name_of(self.kind, self.step)

    @property
    def save(self) -> Save:
        """The future of a save that was taken."""
        if self.future is None:
            raise RuntimeError(f"{self.what} was not taken yet")
        return self.future

    def staged_save(self) -> Staged:
        """The staged save; raises what staging failed with on this rank."""
        if isinstance(self.staged, BaseException):
            raise self.staged
        if self.staged is None:
            raise RuntimeError(f"{self.what} was handed on without its tensors")
        return self.staged

    def release(self) -> None:
        """Give the host memory back. Never raises."""
        if isinstance(self.staged, BaseException):
            traceback.clear_frames(self.staged.__traceback__)
        self.memory.close()
        if self.plan is not None:
            self.plan.release()


def waits_for_itself(call: str) -> InvalidInputError:
    """The error of a call that would wait for the save whose callback makes it."""
    return InvalidInputError(
        f"{call}() in a callback of a save would wait for that save itself: call it on the thread that trains"
    )


def check_wait(timeout: Any) -> None:
    """Check that `timeout` is a number of seconds, or None.

    Raises:
        InvalidTypeError: it is not.
    """
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, Real)):
        raise InvalidTypeError(
            f"timeout is {timeout!r}: give a number of seconds, or None to wait without limit"
        )
