"""Puts tasks on the queue of a pool and returns their results to the waiting callers.

A thread that waits for a result collects answers itself, for everybody: that saves the switch to another thread. A
background thread of the pool collects the answers that nobody waits for.

Invariants:

- A task is in one place: in `_backlog` (the queue had no room), in `_outstanding` (on the queue or in a worker), or
  finished. It leaves `_outstanding` after its answer was handed over, so that `break_down` reaches every other task.
- Answers are handed over without `_lock`: callbacks of users may use the pool.
- An exception while answers are handed over, as Ctrl-C, breaks the pool: some tasks would never be answered.
"""

from __future__ import annotations

import contextlib
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

__all__ = ["AnswerReceiver", "Dispatcher", "TaskFuture"]

# The longest sleep without a look around; everything that matters ends it sooner.
_LONGEST_SLEEP_SECONDS = 1.0
_SHUT_DOWN = "the pool is shut down: make another one"
_ENDED = "the pool was shut down, and ended by force before a worker was free"
_CANCELLED = "the pool was shut down with cancel=True"
_INTERRUPTED = "the pool is broken: Ctrl-C interrupted it while answers were handed over; make another one"
# The ticket of a future that was cancelled before it came on the queue.
_NO_TICKET = 0


class AnswerReceiver(Protocol):
    """Takes the answers of tasks: a future, or a map."""

    def deliver(self, number: int, kind: int, payload: Any, /) -> None:
        """Take the answer of task `number` of this receiver."""

    def describe(self, number: int, /) -> str:
        """Name a task in messages."""


class TaskFuture(Future[Any]):
    """The future that `SharedPool.submit` returns; `number` counts the pool's tasks."""

    def __init__(self, dispatcher: Dispatcher, number: int, lease: _native.BufferLease | None) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._lease = lease
        self.number = number
        self.ticket: int | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Return the result of the task, as `concurrent.futures.Future.result`."""
        return super().result(self._collect(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception of the task, or None, as `concurrent.futures.Future.exception`."""
        return super().exception(self._collect(timeout))

    def cancel(self) -> bool:
        """Cancel the task if no worker has taken it yet.

        Returns:
            Whether it is cancelled.
        """
        if self._dispatcher.revoke(self) and super().cancel():
            self._lease = None
            self.set_running_or_notify_cancel()
        return self.cancelled()

    def running(self) -> bool:
        """Return whether a worker has the task."""
        return not self.done() and self._dispatcher.is_running(self.ticket)

    def deliver(self, _number: int, kind: int, payload: Any) -> None:
        value, error = messages.unpack(kind, payload)
        self._lease = None
        # The pool may have broken down in another thread at this moment.
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def describe(self, _number: int) -> str:
        return f"task {self.number}"

    def _collect(self, timeout: float | None) -> float | None:
        """Collect answers on this thread; the seconds that are left."""
        began = time.monotonic()
        self._dispatcher.collect_until(self.done, timeout)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - began))


class Dispatcher:
    """The tasks of one pool. `open_buffer` opens the shared memory that the payload of an answer refers to."""

    def __init__(self, queue: _native.TaskQueue, open_buffer: Callable[[Any], BufferMessage]) -> None:
        self.pid = os.getpid()
        # None once the pool is over: futures that are kept hold neither its memory nor its descriptor.
        self._queue: _native.TaskQueue | None = queue
        self._open_buffer = open_buffer
        self._lock = threading.Lock()
        # Held by the thread that collects as a caller.
        self._collecting = threading.Lock()
        # By ticket: the receiver, and the receiver's number of the task.
        self._outstanding: dict[int, tuple[AnswerReceiver, int]] = {}
        self._backlog: deque[tuple[TaskFuture, int, Any]] = deque()
        self._abandoned: deque[AnswerReceiver] = deque()
        # How many answers came.
        self._answers = 0
        # Why no more tasks are taken.
        self._refusal: str | None = None
        # The pool is broken, or is to end at once.
        self._is_forced = False
        #: The argument of `close`; None before.
        self.stuck_timeout: float | None = None

    # ---- Tasks ----

    def submit(self, future: TaskFuture, kind: int, payload: Any) -> None:
        """Put a task on the queue, or behind those that wait for room there."""
        with self._lock:
            self.check_open()
            if self._backlog or not self._put(future, kind, payload):
                self._backlog.append((future, kind, payload))
        queue = self._queue
        if self._backlog and queue is not None and queue.is_ready():
            # Only this thread is sure to have the interpreter soon.
            self.collect()

    def put_many(self, receiver: AnswerReceiver, first: int, kind: int, payloads: list[Any]) -> int:
        """Put `payloads` on the queue, numbered from `first` on; how many found room."""
        self.check_open()
        with self._lock:
            if self._backlog or self._queue is None:
                return 0
            tickets = self._queue.put_many(kind, payloads)
            entries = zip(repeat(receiver), range(first, first + len(tickets)), strict=False)
            self._outstanding.update(zip(tickets, entries, strict=True))
            return len(tickets)

    def check_open(self) -> None:
        """Raise `PoolError` unless this process may submit tasks."""
        self.check_same_process()
        if self._refusal is not None:
            raise PoolError(self._refusal)

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

    def revoke(self, future: TaskFuture) -> bool:
        """Take the task of a future back; False if a worker has it or it is over."""
        if os.getpid() != self.pid:
            return False
        with self._lock:
            if future.ticket is None:
                future.ticket = _NO_TICKET
                return True
            return self._revoke(future.ticket)

    def abandon(self, receiver: AnswerReceiver) -> None:
        """Forget the tasks of `receiver`. Takes no lock: it is called by destructors too."""
        self._abandoned.append(receiver)
        self._wake()

    def _put(self, future: TaskFuture, kind: int, payload: Any) -> bool:
        if future.ticket == _NO_TICKET:
            return True
        ticket = None if self._queue is None else self._queue.put(kind, payload)
        if ticket is None:
            return False
        self._outstanding[ticket] = future, future.number
        future.ticket = ticket
        return True

    def _revoke(self, ticket: int) -> bool:
        is_mine = ticket in self._outstanding and self._queue is not None and self._queue.revoke(ticket)
        if is_mine:
            del self._outstanding[ticket]
        return is_mine

    def _wake(self) -> None:
        queue = self._queue
        if queue is not None:
            queue.end_waits()

    # ---- Answers ----

    def collect_until(self, is_ready: Callable[[], bool], timeout: float | None) -> None:
        """Collect answers on this thread until `is_ready()` or the time is over.

        Returns earlier if another thread collects already, or the pool is over.
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
                self.collect()
        finally:
            self._collecting.release()

    def collect(self) -> None:
        """Hand over every answer that has come, without waiting."""
        try:
            with self._lock:
                answers: list[Any] = [] if self._queue is None else self._queue.collect()
                for place, (ticket, kind, payload) in enumerate(answers):
                    if kind & IN_BUFFER:
                        # With the lock: `lose` returns only after all buffers of a dead worker were opened. Also if no
                        # receiver is left: the worker's memory is in use until it is opened.
                        answers[place] = ticket, *self._opened(kind, payload)
                while self._backlog and self._put(*self._backlog[0]):
                    self._backlog.popleft()
            self._answers += len(answers)
            for ticket, kind, payload in answers:
                entry = self._outstanding.get(ticket)
                if entry is not None:
                    receiver, number = entry
                    receiver.deliver(number, kind, payload)
                    self._outstanding.pop(ticket, None)
        except BaseException:
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
            self._refusal = self._refusal or failure
            self._is_forced = True
            backlog, self._backlog = self._backlog, deque()
        for ticket in list(self._outstanding):
            self._fail(ticket, lambda task: PoolError(f"{task} has no result: {failure}"))
        for future, _, _ in backlog:
            with contextlib.suppress(BaseException):
                future.deliver(0, LOST, PoolError(f"{future.describe(0)} was not begun: {failure}"))
        self._wake()

    def _fail(self, ticket: int, error_of: Callable[[str], Exception]) -> None:
        entry = self._outstanding.get(ticket)
        if entry is not None:
            receiver, number = entry
            # A callback of users may raise anything, after its future has its error.
            with contextlib.suppress(BaseException):
                receiver.deliver(number, LOST, error_of(receiver.describe(number)))
            self._outstanding.pop(ticket, None)

    # ---- The background thread ----

    def run(self) -> bool:
        """Collect the answers that no caller collects, until the pool is over.

        Returns:
            Whether every task has its answer; False if the pool ends by force or is broken.
        """
        silent_since, seen = time.monotonic(), -1
        while (queue := self._queue) is not None:
            timeout = self.stuck_timeout
            longest = _LONGEST_SLEEP_SECONDS if timeout is None else min(_LONGEST_SLEEP_SECONDS, timeout)
            queue.wait(longest, False)
            before = self._answers
            self.collect()
            if before != self._answers and self._collecting.locked():
                # A caller may have begun to wait for one of these answers.
                queue.end_waits()
            self._drop_abandoned()
            if self._is_forced:
                return False
            if self._refusal is not None and not self._outstanding and not self._backlog:
                return True
            if self._refusal is None or seen != self._answers:
                silent_since, seen = time.monotonic(), self._answers
            elif timeout is not None and time.monotonic() - silent_since >= timeout:
                return False
        return False

    def finish(self) -> None:
        """Fail the tasks that were never begun, and let go of the queue: no worker lives any more."""
        with self._lock:
            queue, self._queue = self._queue, None
        self.break_down(_ENDED)
        if queue is not None:
            queue.end_waits()

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
        self._refusal = self._refusal or _SHUT_DOWN
        self.stuck_timeout = stuck_timeout
        self._is_forced = self._is_forced or is_forced
        if cancel:
            self._cancel_all()
        self._wake()

    def drop(self) -> None:
        """End when all is done: the pool object is gone. Takes no lock, as `abandon`."""
        self._refusal = self._refusal or _SHUT_DOWN
        self._wake()

    def _cancel_all(self) -> None:
        with self._lock:
            futures = [waiting[0] for waiting in self._backlog]
            pieces: list[tuple[AnswerReceiver, int]] = []
            # The last first: workers take from the other end meanwhile.
            for ticket, (receiver, number) in reversed(list(self._outstanding.items())):
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
