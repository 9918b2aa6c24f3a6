"""Puts tasks on the queue of a pool, and hands their answers to futures and maps.

An answer is a result or an error. A thread that waits for an answer collects all answers itself, which saves a switch
to another thread. A background thread of the pool collects answers while no caller waits.

Invariants:

- A task is in `_backlog` (the queue had no room), in `_outstanding` (on the queue or in a worker), or finished. It
  leaves `_outstanding` after its answer was handed over, so `break_down` reaches every other task.
- Answers are handed over without `_lock`, since callbacks of users may use the pool.
- An exception while answers are handed over, such as Ctrl-C, breaks the pool: some tasks would never be answered.
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
from tundish.shm import messages
from tundish.shm.messages import IN_BUFFER, PARENT_ERROR, BufferMessage

# The longest sleep before the state is checked again. Answers, Ctrl-C and the end of the pool end it sooner.
_MAX_SLEEP_SECONDS = 1.0
_SHUT_DOWN = "the pool is shut down: make another one"
_ENDED = "the pool was shut down before this task started"
_CANCELLED = "the pool was shut down with cancel=True"
_INTERRUPTED = "the pool is broken: Ctrl-C interrupted it while answers were handed over; make another one"
# The id of a task that was cancelled before it came on the queue.
_NO_TASK_ID = 0


class AnswerHandler(Protocol):
    """Takes the answers of its tasks: a future or a map."""

    def deliver(self, number: int, kind: int, payload: Any, /) -> None:
        """Take the answer of the task with this number."""

    def describe(self, number: int, /) -> str:
        """Return the name of a task for error messages."""


class TaskFuture(Future[Any]):
    """The future that `SharedPool.submit` returns; `number` counts the pool's tasks."""

    def __init__(self, dispatcher: Dispatcher, number: int, lease: _native.SentBuffer | None) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._lease = lease
        self.number = number
        self.task_id: int | None = None

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
        return not self.done() and self._dispatcher.is_running(self.task_id)

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
        """Collect answers on this thread. Returns the seconds that are left."""
        began = time.monotonic()
        self._dispatcher.collect_until(self.done, timeout)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - began))


class Dispatcher:
    """The tasks of one pool. `open_buffer` opens the shared memory to which the payload of an answer refers."""

    def __init__(self, queue: _native.TaskQueue, open_buffer: Callable[[Any], BufferMessage]) -> None:
        self.pid = os.getpid()
        # None once the pool has ended, so that futures keep neither its memory nor its descriptor.
        self._queue: _native.TaskQueue | None = queue
        self._open_buffer = open_buffer
        self._lock = threading.Lock()
        # Held by the thread that collects as a caller.
        self._collecting = threading.Lock()
        # By task id: the handler, and the number of the task there.
        self._outstanding: dict[int, tuple[AnswerHandler, int]] = {}
        self._backlog: deque[tuple[TaskFuture, int, Any]] = deque()
        self._abandoned: deque[AnswerHandler] = deque()
        # How many answers came.
        self._answers = 0
        # The reason why no more tasks are taken.
        self._refusal: str | None = None
        # The pool is broken, or has to end at once.
        self._is_forced = False
        #: The argument of `close`; None before.
        self.stuck_timeout: float | None = None

    # ---- Tasks ----

    def submit(self, future: TaskFuture, kind: int, payload: Any) -> None:
        """Put a task on the queue, or in the backlog if the queue has no room."""
        with self._lock:
            self.check_open()
            if self._backlog or not self._put(future, kind, payload):
                self._backlog.append((future, kind, payload))
        queue = self._queue
        if self._backlog and queue is not None and queue.is_ready():
            # The background thread may not get the GIL soon.
            self.collect()

    def put_many(self, handler: AnswerHandler, first: int, kind: int, payloads: list[Any]) -> int:
        """Put tasks on the queue, numbered from `first` on. Returns the number of those that found room."""
        self.check_open()
        with self._lock:
            if self._backlog or self._queue is None:
                return 0
            task_ids = self._queue.put_many(kind, payloads)
            entries = zip(repeat(handler), range(first, first + len(task_ids)), strict=False)
            self._outstanding.update(zip(task_ids, entries, strict=True))
            return len(task_ids)

    @property
    def is_open(self) -> bool:
        """Whether it takes tasks."""
        return self._refusal is None

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

    def is_running(self, task_id: int | None) -> bool:
        """Return whether a worker has the task."""
        queue = self._queue
        return queue is not None and task_id is not None and queue.running(task_id)

    def revoke(self, future: TaskFuture) -> bool:
        """Take the task of a future back. Returns False if a worker has it or it has an answer."""
        if os.getpid() != self.pid:
            return False
        with self._lock:
            if future.task_id is None:
                future.task_id = _NO_TASK_ID
                return True
            return self._revoke(future.task_id)

    def abandon(self, handler: AnswerHandler) -> None:
        """Forget the tasks of `handler`. Takes no lock: it is called by destructors too."""
        self._abandoned.append(handler)
        self._wake()
        if self._queue is None:
            # No thread reads them any more, and a map keeps its pool alive.
            self._abandoned.clear()

    def _put(self, future: TaskFuture, kind: int, payload: Any) -> bool:
        if future.task_id == _NO_TASK_ID:
            return True
        task_id = None if self._queue is None else self._queue.put(kind, payload)
        if task_id is None:
            return False
        self._outstanding[task_id] = future, future.number
        future.task_id = task_id
        return True

    def _revoke(self, task_id: int) -> bool:
        is_mine = task_id in self._outstanding and self._queue is not None and self._queue.revoke(task_id)
        if is_mine:
            del self._outstanding[task_id]
        return is_mine

    def _wake(self) -> None:
        queue = self._queue
        if queue is not None:
            queue.end_waits()

    # ---- Answers ----

    def collect_until(self, is_ready: Callable[[], bool], timeout: float | None) -> None:
        """Collect answers on this thread until `is_ready()` or the timeout.

        Returns at once if another thread collects, and early if the pool ends.
        """
        if is_ready():
            return
        self.check_same_process()
        if not self._collecting.acquire(blocking=False):
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        remaining = _MAX_SLEEP_SECONDS
        try:
            while not is_ready() and (queue := self._queue) is not None:
                if deadline is not None:
                    remaining = min(_MAX_SLEEP_SECONDS, deadline - time.monotonic())
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
                for place, (task_id, kind, payload) in enumerate(answers):
                    if kind & IN_BUFFER:
                        # Under the lock, so that `lose` returns after all buffers of a dead worker were opened. Also
                        # without a handler: the worker's memory is in use until its buffer is opened.
                        answers[place] = task_id, *self._opened(kind, payload)
                while self._backlog and self._put(*self._backlog[0]):
                    self._backlog.popleft()
            self._answers += len(answers)
            for task_id, kind, payload in answers:
                entry = self._outstanding.get(task_id)
                if entry is not None:
                    handler, number = entry
                    handler.deliver(number, kind, payload)
                    self._outstanding.pop(task_id, None)
        except BaseException:
            self.break_down(_INTERRUPTED)
            raise

    def _opened(self, kind: int, payload: Any) -> tuple[int, Any]:
        try:
            return kind, self._open_buffer(payload)
        except Exception as error:  # noqa: BLE001 (the error takes the place of the result)
            return PARENT_ERROR, PoolError(f"a result came in shared memory that cannot be opened: {error}")

    def lose(self, task_ids: Iterable[int], error_of: Callable[[str], Exception]) -> None:
        """Fail the tasks of a dead worker. `error_of` returns the error for a task's description."""
        self.collect()
        for task_id in task_ids:
            self._fail(task_id, error_of)
        self._wake()

    def break_down(self, failure: str) -> None:
        """Fail every task that has no answer, and refuse new ones."""
        with self._lock:
            self._refusal = self._refusal or failure
            self._is_forced = True
            backlog, self._backlog = self._backlog, deque()
        for task_id in list(self._outstanding):
            self._fail(task_id, lambda task: PoolError(f"{task} has no result: {failure}"))
        for future, _, _ in backlog:
            with contextlib.suppress(BaseException):
                future.deliver(0, PARENT_ERROR, PoolError(f"{future.describe(0)} was not begun: {failure}"))
        self._wake()

    def _fail(self, task_id: int, error_of: Callable[[str], Exception]) -> None:
        entry = self._outstanding.get(task_id)
        if entry is not None:
            handler, number = entry
            # A callback of users may raise anything; its future has its error by then.
            with contextlib.suppress(BaseException):
                handler.deliver(number, PARENT_ERROR, error_of(handler.describe(number)))
            self._outstanding.pop(task_id, None)

    # ---- The background thread ----

    def run(self) -> bool:
        """Collect answers while no caller does, until the pool ends.

        Returns:
            True if every task has its answer; False if the pool ends by force or is broken.
        """
        silent_since, seen = time.monotonic(), -1
        while (queue := self._queue) is not None:
            timeout = self.stuck_timeout
            longest = _MAX_SLEEP_SECONDS if timeout is None else min(_MAX_SLEEP_SECONDS, timeout)
            queue.wait(longest, False)
            before = self._answers
            self.collect()
            if before != self._answers and self._collecting.locked():
                # A caller may already wait for one of these answers.
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
        """Fail the tasks that were never begun, and release the queue. No worker lives any more."""
        with self._lock:
            queue, self._queue = self._queue, None
        self.break_down(_ENDED)
        self._abandoned.clear()
        if queue is not None:
            queue.end_waits()

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            handler = self._abandoned.popleft()
            with self._lock:
                for task_id in [
                    task_id for task_id, entry in self._outstanding.items() if entry[0] is handler
                ]:
                    self._revoke(task_id)

    # ---- The end ----

    def close(self, *, cancel: bool, stuck_timeout: float | None, is_forced: bool = False) -> None:
        """Refuse new tasks, and end when all others have answers.

        Args:
            cancel: cancel tasks that no worker has begun.
            stuck_timeout: seconds without an answer after which workers are killed; None for never.
            is_forced: kill the workers at once.
        """
        self._refusal = self._refusal or _SHUT_DOWN
        self.stuck_timeout = stuck_timeout
        self._is_forced = self._is_forced or is_forced
        if cancel:
            self._cancel_all()
        self._wake()

    def drop(self) -> None:
        """End when all tasks have answers: the pool object is gone. Takes no lock, like `abandon`."""
        self._refusal = self._refusal or _SHUT_DOWN
        self._wake()

    def _cancel_all(self) -> None:
        with self._lock:
            futures = [waiting[0] for waiting in self._backlog]
            of_maps: list[tuple[AnswerHandler, int]] = []
            # The last first, since workers take from the other end meanwhile.
            for task_id, (handler, number) in reversed(list(self._outstanding.items())):
                if isinstance(handler, TaskFuture):
                    futures.append(handler)
                elif self._revoke(task_id):
                    of_maps.append((handler, number))
        for handler, number in of_maps:
            handler.deliver(
                number, PARENT_ERROR, PoolError(f"{handler.describe(number)} was not begun: {_CANCELLED}")
            )
        for future in futures:
            future.cancel()
