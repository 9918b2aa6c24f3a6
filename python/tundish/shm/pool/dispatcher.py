"""Puts tasks on the queue of a pool and returns their results to the waiting callers.

A thread that waits for a result collects answers itself, for everybody: that saves the switch to another thread. A
background thread of the pool collects what nobody waits for.

Invariants:

- A task is in one place: in `_backlog` (the queue had no room), in `_outstanding` (on the queue or in a worker), or
  finished. It leaves `_outstanding` after its answer was handed over, so that `break_down` reaches every other task.
- Answers are handed over without `_lock`: callbacks of users may use the pool.
- Ctrl-C while answers are handed over breaks the pool: some tasks would never be answered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from itertools import repeat
from typing import Any, Protocol

from tundish import _native
from tundish.errors import PoolError
from tundish.shm.pool import messages
from tundish.shm.pool.messages import IN_BUFFER, LOST, BufferMessage

__all__ = ["Dispatcher", "Receiver", "TaskFuture"]

_log = logging.getLogger("tundish.shm")

# The longest sleep without a look around; everything that matters ends it sooner.
_LONGEST_SLEEP_SECONDS = 1.0
# The background thread stays away so long while callers collect: it would take the interpreter from them.
_YIELD_SECONDS = 5e-4
_SHUT_DOWN = "the pool is shut down: make another one"
_ENDED = "the pool was shut down, and ended by force before a worker was free"
_CANCELLED = "the pool was shut down with cancel=True"
_INTERRUPTED = "the pool is broken: Ctrl-C interrupted it while answers were handed over; make another one"


class Receiver(Protocol):
    """Takes the answers of tasks: a future, or a map."""

    def deliver(self, number: int, kind: int, payload: Any, /) -> None:
        """Take the answer of task `number` of this receiver."""

    def describe(self, number: int, /) -> str:
        """Name a task in messages."""


class TaskFuture(Future[Any]):
    """The future that `SharedPool.submit` returns. `number`: how many tasks were submitted before it."""

    def __init__(self, dispatcher: Dispatcher, number: int) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self.number = number
        self.ticket: int | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Return what the task returned, as `concurrent.futures.Future.result`."""
        return super().result(self._collect(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the task raised, or None, as `concurrent.futures.Future.exception`."""
        return super().exception(self._collect(timeout))

    def cancel(self) -> bool:
        """Cancel the task if no worker has taken it yet.

        Returns:
            Whether it is cancelled.
        """
        return self._dispatcher.cancel(self)

    def running(self) -> bool:
        """Return whether a worker has the task."""
        return not self.done() and self._dispatcher.is_running(self.ticket)

    def set_cancelled(self) -> None:
        """The task was taken back: tell everybody who waits."""
        if super().cancel():
            self.set_running_or_notify_cancel()

    def deliver(self, _number: int, kind: int, payload: Any) -> None:
        """See `Receiver`."""
        value, error = messages.unpack(kind, payload)
        # The pool may have broken down in another thread at this moment.
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def describe(self, _number: int) -> str:
        """See `Receiver`."""
        return f"task {self.number}"

    def _collect(self, timeout: float | None) -> float | None:
        """Collect answers on this thread; the seconds that are left."""
        began = time.monotonic()
        self._dispatcher.collect_until(self.done, timeout)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - began))

    def _invoke_callbacks(self) -> None:
        # The base lets SystemExit and the like pass, which would end the thread that hands answers over.
        for callback in self._done_callbacks:  # type: ignore[attr-defined]
            try:
                callback(self)
            except BaseException:  # noqa: BLE001
                _log.exception("a callback of %r raised", self)


class Dispatcher:
    """The tasks of one pool.

    Args:
        queue: the pool's task queue.
        open_buffer: opens the shared memory that the payload of an answer refers to.
    """

    def __init__(self, queue: _native.TaskQueue, open_buffer: Callable[[Any], BufferMessage]) -> None:
        self.pid = os.getpid()
        # None once the pool is over: futures that are kept hold neither its memory nor its descriptor.
        self._queue: _native.TaskQueue | None = queue
        self._open_buffer = open_buffer
        self._lock = threading.Lock()
        # Held by the thread that collects as a caller.
        self._collecting = threading.Lock()
        self._outstanding: dict[int, tuple[Receiver, int, _native.SendBuffer | None]] = {}
        self._backlog: deque[tuple[TaskFuture, int, Any, _native.SendBuffer | None]] = deque()
        self._abandoned: deque[Receiver] = deque()
        # How often callers collected, and how many answers came.
        self._calls = 0
        self._answers = 0
        self._refusal: str | None = None
        self._failure: str | None = None
        self._is_forced = False
        #: What `close` was given; None before.
        self.stuck_timeout: float | None = None

    # ---- Tasks ----

    def submit(self, future: TaskFuture, kind: int, payload: Any, buffer: _native.SendBuffer | None) -> None:
        """Put a task on the queue, or behind those that wait for room there."""
        with self._lock:
            self.check_open()
            if self._backlog or not self._put(future, future.number, kind, payload, buffer):
                self._backlog.append((future, kind, payload, buffer))
        queue = self._queue
        if self._backlog and queue is not None and queue.is_ready():
            # Only this thread is sure to have the interpreter soon.
            self.collect()

    def put(
        self, receiver: Receiver, number: int, kind: int, payload: Any, buffer: _native.SendBuffer | None
    ) -> bool:
        """Put one task on the queue; whether there is room."""
        with self._lock:
            self.check_open()
            return not self._backlog and self._put(receiver, number, kind, payload, buffer)

    def put_many(self, receiver: Receiver, first: int, kind: int, payloads: list[Any]) -> int:
        """Put `payloads` on the queue, numbered from `first` on; how many found room."""
        with self._lock:
            self.check_open()
            if self._backlog or self._queue is None:
                return 0
            tickets = self._queue.put_many(kind, payloads, 0)
            numbers = range(first, first + len(tickets))
            entries = zip(repeat(receiver), numbers, repeat(None), strict=False)
            self._outstanding.update(zip(tickets, entries, strict=True))
            return len(tickets)

    def check_open(self) -> None:
        """Raise `PoolError` unless tasks may be submitted."""
        reason = self._failure
        if self._refusal is not None and reason in (None, _ENDED):
            # `_ENDED` is for tasks that were never begun.
            reason = self._refusal
        if reason is not None:
            raise PoolError(reason)

    def check_same_process(self) -> None:
        """Raise `PoolError` in a child made by `fork`."""
        if os.getpid() != self.pid:
            raise PoolError(
                f"this pool belongs to process {self.pid}, which made it, and this is process {os.getpid()}: "
                "make a pool here"
            )

    def is_running(self, ticket: int | None) -> bool:
        """Return whether a worker has the task."""
        queue = self._queue
        return queue is not None and ticket is not None and queue.running(ticket)

    def cancel(self, future: TaskFuture) -> bool:
        """Take a task back if no worker has it; whether the future is cancelled."""
        with self._lock:
            place = next((at for at, waiting in enumerate(self._backlog) if waiting[0] is future), None)
            if place is not None:
                del self._backlog[place]
            elif not self._revoke(future.ticket):
                return future.cancelled()
        future.set_cancelled()
        return True

    def abandon(self, receiver: Receiver) -> None:
        """Forget the tasks of `receiver`. Takes no lock: it is called by destructors too."""
        self._abandoned.append(receiver)
        self._wake()

    def _put(
        self, receiver: Receiver, number: int, kind: int, payload: Any, buffer: _native.SendBuffer | None
    ) -> bool:
        ticket = None if self._queue is None else self._queue.put(kind, payload)
        if ticket is None:
            return False
        self._outstanding[ticket] = receiver, number, buffer
        if isinstance(receiver, TaskFuture):
            receiver.ticket = ticket
        return True

    def _refill(self) -> None:
        while self._backlog and self._put(
            self._backlog[0][0], self._backlog[0][0].number, *self._backlog[0][1:]
        ):
            self._backlog.popleft()

    def _revoke(self, ticket: int | None) -> bool:
        is_mine = ticket in self._outstanding and self._queue is not None and self._queue.revoke(ticket)
        if is_mine and ticket is not None:
            self._forget(ticket)
        return is_mine

    def _forget(self, ticket: int) -> None:
        _, _, buffer = self._outstanding.pop(ticket, (None, None, None))
        if buffer is not None:
            # Its receiver has opened it by now, or never will.
            buffer.revoke()

    def _wake(self) -> None:
        queue = self._queue
        if queue is not None:
            queue.end_waits()

    # ---- Answers ----

    def collect_until(self, is_ready: Callable[[], bool], timeout: float | None) -> None:
        """Collect answers on this thread until `is_ready()` or the time is over.

        Returns earlier where another thread collects already, or the pool is over.
        """
        if is_ready():
            return
        self.check_same_process()
        if not self._collecting.acquire(blocking=False):
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        remaining = _LONGEST_SLEEP_SECONDS
        try:
            while not is_ready() and (queue := self._queue) is not None:
                if deadline is not None:
                    remaining = min(_LONGEST_SLEEP_SECONDS, deadline - time.monotonic())
                    if remaining <= 0:
                        return
                queue.wait(remaining, True)
                self._calls += 1
                self.collect()
        finally:
            self._collecting.release()

    def collect(self) -> None:
        """Hand over every answer that has come, without waiting."""
        try:
            with self._lock:
                answers = [] if self._queue is None else self._queue.collect()
                if self._backlog:
                    self._refill()
            outstanding = self._outstanding
            self._answers += len(answers)
            for ticket, kind, payload in answers:
                if kind & IN_BUFFER:
                    # Also where nobody waits for it any more: the worker waits until it is opened.
                    kind, payload = self._opened(kind, payload)
                entry = outstanding.get(ticket)
                if entry is not None:
                    receiver, number, buffer = entry
                    receiver.deliver(number, kind, payload)
                    outstanding.pop(ticket, None)
                    if buffer is not None:
                        buffer.revoke()
        except KeyboardInterrupt:
            self.break_down(_INTERRUPTED)
            raise

    def _opened(self, kind: int, payload: Any) -> tuple[int, Any]:
        try:
            return kind, self._open_buffer(payload)
        except Exception as error:  # noqa: BLE001 (whatever it is, it stands for the result)
            return LOST, PoolError(f"a result came in shared memory that cannot be opened: {error}")

    def lose(self, tickets: Iterable[int], error_of: Callable[[str], Exception]) -> None:
        """Fail the tasks of a dead worker. `error_of` makes an error of a task's description."""
        self.collect()
        for ticket in tickets:
            self._fail(ticket, error_of)
        self._wake()

    def break_down(self, failure: str) -> None:
        """Fail every task that has no answer: the pool cannot go on."""
        with self._lock:
            self._failure = failure
            backlog, self._backlog = self._backlog, deque()
        for ticket in list(self._outstanding):
            self._fail(ticket, lambda task: PoolError(f"{task} has no result: {failure}"))
        for future, _, _, buffer in backlog:
            future.deliver(0, LOST, PoolError(f"{future.describe(0)} was not begun: {failure}"))
            if buffer is not None:
                buffer.revoke()
        self._wake()

    def _fail(self, ticket: int, error_of: Callable[[str], Exception]) -> None:
        entry = self._outstanding.get(ticket)
        if entry is not None:
            receiver, number, _ = entry
            receiver.deliver(number, LOST, error_of(receiver.describe(number)))
            self._forget(ticket)

    # ---- The background thread ----

    def run(self) -> bool:
        """Collect what no caller collects, until the pool is over.

        Returns:
            Whether every task has its answer; False where the pool ends by force or is broken.
        """
        silent_since, seen = time.monotonic(), -1
        while (queue := self._queue) is not None:
            queue.wait(self._nap(), False)
            self._yield_to_callers()
            self.collect()
            self._drop_abandoned()
            if self._is_forced or self._failure is not None:
                return False
            if self._refusal is not None and not self._outstanding and not self._backlog:
                return True
            if self._refusal is None or seen != self._answers:
                silent_since, seen = time.monotonic(), self._answers
            elif self.stuck_timeout is not None and time.monotonic() - silent_since >= self.stuck_timeout:
                return False
        return False

    def finish(self) -> None:
        """Fail what was never begun, and let go of the queue: no worker lives any more."""
        if self._failure is None:
            self.break_down(_ENDED)
        with self._lock:
            self._queue = None

    def _yield_to_callers(self) -> None:
        seen = -1
        while seen != self._calls and self._refusal is None and not self._abandoned:
            seen = self._calls
            time.sleep(_YIELD_SECONDS)

    def _nap(self) -> float:
        if self._refusal is None or self.stuck_timeout is None:
            return _LONGEST_SLEEP_SECONDS
        return min(_LONGEST_SLEEP_SECONDS, max(self.stuck_timeout / 4, 0.001))

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            receiver = self._abandoned.popleft()
            with self._lock:
                for ticket in [ticket for ticket, entry in self._outstanding.items() if entry[0] is receiver]:
                    self._revoke(ticket)

    # ---- The end ----

    def close(self, *, cancel: bool, stuck_timeout: float | None, is_forced: bool = False) -> None:
        """Refuse tasks from now on, and end when those there are done.

        Args:
            cancel: cancel tasks that no worker has begun.
            stuck_timeout: seconds without any answer after which workers are ended by force; None: never.
            is_forced: end them at once.
        """
        self._refusal = _SHUT_DOWN
        self.stuck_timeout = stuck_timeout
        self._is_forced = self._is_forced or is_forced
        if cancel:
            self._cancel_all()
        self._wake()

    def drop(self) -> None:
        """End when all is done: nobody has the pool any more. Takes no lock, as `abandon`."""
        self._refusal = self._refusal or _SHUT_DOWN
        self._wake()

    def _cancel_all(self) -> None:
        with self._lock:
            futures = [waiting[0] for waiting in self._backlog]
            pieces: list[tuple[Receiver, int]] = []
            # The last first: workers take from the other end meanwhile.
            for ticket, (receiver, number, _) in reversed(list(self._outstanding.items())):
                if isinstance(receiver, TaskFuture):
                    futures.append(receiver)
                elif self._revoke(ticket):
                    pieces.append((receiver, number))
        for receiver, number in pieces:
            receiver.deliver(
                number, LOST, PoolError(f"{receiver.describe(number)} was not begun: {_CANCELLED}")
            )
        for future in futures:
            future.cancel()

    def disown(self) -> None:
        """Be of no use in a child made by `fork`, and touch nothing that the parent goes on with."""
        # Threads of the parent may hold its locks.
        self._lock = threading.Lock()
        self._collecting = threading.Lock()
        self._queue = None
        self._failure = f"this pool belongs to process {self.pid}, which made it; make a pool in this one"
        self._backlog.clear()
        self._outstanding.clear()
