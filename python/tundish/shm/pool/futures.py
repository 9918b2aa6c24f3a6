"""The future of one task of a pool.

Owns the way from an answer on the task board to a result. It is a `concurrent.futures.Future` in all that can be seen;
what differs: `result()` collects answers on the caller's own thread, `cancel()` takes the task off the board,
`running()` asks the board, and an answer is unpickled by the first who asks for it. What always holds:

1. `arrive` and `withdraw` may be interrupted anywhere (Ctrl-C) and be called again: the future is then finished once.
2. Waiters and callbacks are told by a thread of the pool, which nothing interrupts, each of them once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from tundish.errors import PoolError
from tundish.shm.pool import messages
from tundish.waiting import Guard, Moment, Waiters, taken

if TYPE_CHECKING:
    from tundish.shm.pool.engine import Engine

__all__ = ["TaskFuture"]

_log = logging.getLogger("tundish.shm")

T = TypeVar("T")

_DONE = frozenset({CANCELLED_AND_NOTIFIED, FINISHED})


class TaskFuture(Future[Any]):
    """What `SharedPool.submit` returns. `number`: how many tasks were submitted before."""

    # Waiters that were told, with the callbacks. Of few: the others have none of their own.
    _told: tuple[Any, ...] | None = None

    def __init__(self, engine: Engine, number: int) -> None:
        # Not the base's, which makes all that only few futures of many need: it costs more than the task.
        self._state = PENDING
        self._result = self._exception = None
        self._guard = Guard()
        self._bell: Moment | None = None
        self._waiter_list: Waiters | None = None
        self._callback_list: list[Any] | None = None
        self._engine = engine
        self._answer: tuple[int, Any] | None = None
        self.number = number
        self.ticket: int | None = None

    # ---- What the base looks for ----

    @property
    def _condition(self) -> Guard:  # type: ignore[override] # the base assigns it
        return self._guard

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override] # the base assigns it
        with self._guard:
            if self._waiter_list is None:
                self._waiter_list = Waiters()
            return self._waiter_list

    @property
    def _done_callbacks(self) -> list[Any]:
        with self._guard:
            if self._callback_list is None:
                self._callback_list = []
            return self._callback_list

    # ---- What users call ----

    def result(self, timeout: float | None = None) -> Any:
        """What the task returned, collected on this thread; raises as `concurrent.futures.Future.result`."""
        self._attend(timeout)
        if self._state == FINISHED and self._exception is None:
            return self._result
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the task raised, or None; raises as `concurrent.futures.Future.exception`."""
        self._attend(timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Take the task back, if no worker has it yet; True if it is cancelled."""
        return self._engine.withdraw(self) or self.cancelled()

    def running(self) -> bool:
        """Whether a worker has the task."""
        return self._state == PENDING and self._engine.is_running(self)

    def __repr__(self) -> str:
        self._unpack()
        return super().__repr__()

    # ---- What the engine calls ----

    def arrive(self, _number: int, kind: int, payload: Any) -> None:
        """The answer came."""
        if get_ident() == self._engine.main:
            # As below, in half of the time.
            with self._guard:
                self._note((kind, payload), FINISHED)
        else:
            self._guarded(partial(self._note, (kind, payload), FINISHED))

    def withdraw(self) -> None:
        """It was taken back."""
        self._guarded(partial(self._note, None, CANCELLED_AND_NOTIFIED))

    def _note(self, answer: tuple[int, Any] | None, state: str) -> None:
        if self._state not in _DONE:
            if self._waiter_list or self._callback_list:
                self._engine.announce_later(self, tuple(self._waiters))
            self._answer = answer
            self._state = state
        if self._bell is not None:
            self._bell.come()

    def is_ready(self) -> bool:
        return self._state in _DONE

    def park(self, seconds: float) -> None:
        """Wait while another thread collects."""
        bell = self._bell
        if bell is None:
            # One that another thread makes at the same time is waited for in vain, but not for long.
            self._bell = bell = Moment()
        if self._state not in _DONE:
            bell.wait(seconds)

    def announce(self, waiters: tuple[Any, ...]) -> None:
        """Tell those who waited when the answer came, and the callbacks."""
        if not self._guarded(self.is_ready):
            # Whoever brought the answer was interrupted; it comes again.
            return
        # It may have come again before this.
        before, self._told = self._told, (*(self._told or ()), *waiters)
        try:
            self._unpack()
        except BaseException as error:  # noqa: BLE001 (no Ctrl-C comes to this thread: the result's own code raised it)
            self._answer, self._exception = None, messages.cannot_unpickle(error)
        for waiter in waiters:
            if before is not None and waiter in before:
                continue
            if self._state != FINISHED:
                waiter.add_cancelled(self)
            elif self._exception is None:
                waiter.add_result(self)
            else:
                waiter.add_exception(self)
        for callback in self._done_callbacks if before is None else ():
            try:
                callback(self)
            except BaseException:  # noqa: BLE001 (also SystemExit: the thread is needed for what comes next)
                _log.exception("a callback of %r raised", self)

    def describe(self, _number: int) -> str:
        """The task, for messages."""
        return f"task {self.number}"

    # ---- On the way ----

    def _attend(self, timeout: float | None) -> None:
        if self._state not in _DONE:
            if os.getpid() != self._engine.pid:
                raise PoolError(
                    f"this future belongs to process {self._engine.pid}, which made the pool; "
                    f"in its child {os.getpid()} the result never comes: ask for it there"
                )
            self._engine.attend(self, timeout)
        self._unpack()

    def _unpack(self) -> None:
        if self._answer is not None:
            self._guarded(self._unpack_once)

    def _unpack_once(self) -> None:
        if self._answer is not None:
            self._result, self._exception = messages.unpack(*self._answer)
            self._answer = None

    def _guarded(self, work: Callable[[], T]) -> T:
        """`work` under the lock, which Ctrl-C, that comes to the main thread alone, may have left taken there."""
        if get_ident() == self._engine.main:
            with self._guard:
                return work()
        self._guard = guard = taken(self._guard)
        try:
            return work()
        finally:
            guard.release()
