"""Starts, watches, replaces and ends the workers of a pool.

A supervisor has two threads. One runs the dispatcher, and ends the pool when that returns. The other watches the
workers. The threads keep the resources of the pool, and release them when the pool ends.

Invariants:

- A dead worker is reaped on the queue first, so that its task fails and no thread waits for it.
- When the watching thread ends, no worker lives.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from multiprocessing import util
from typing import Final

from tundish import _native
from tundish.errors import WorkerDiedError
from tundish.shm.pool.dispatcher import Dispatcher
from tundish.shm.pool.fork_server import ForkServer
from tundish.shm.pool.processes import SpawnedWorkers, WorkerExit, WorkersLostError
from tundish.shm.pool.worker_messages import FAILED, READY, WorkerMessages

__all__ = ["STUCK_TIMEOUT_SECONDS", "Supervisor"]

STUCK_TIMEOUT_SECONDS: Final = 30.0

# The pool breaks at 30 points in a row: 10 for a start that fails, 1 for one that is killed, which may not recur.
_FAILED_START: Final = 10
_KILLED_START: Final = 1
_MAX_POINTS: Final = 30
_ENDING_SECONDS: Final = 30.0


class Supervisor:
    """The threads and workers of one pool. `hint` is the likely reason if workers do not start."""

    def __init__(
        self,
        queue: _native.TaskQueue,
        dispatcher: Dispatcher,
        control: WorkerMessages,
        workers: SpawnedWorkers | ForkServer,
        *,
        count: int,
        hint: str,
    ) -> None:
        self._queue = queue
        self._dispatcher = dispatcher
        self._control = control
        self._workers = workers
        self._count = count
        self._reason = hint
        self._starting: set[int] = set()
        self._ready: set[int] = set()
        self._killed: set[int] = set()
        self._failed_starts: Counter[int] = Counter()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The time at which the remaining workers are killed; None while the pool runs.
        self._deadline: float | None = None
        self._is_forced = False
        # The first call of `_run` takes it; further calls do nothing.
        self._claim = threading.Lock()
        self._runner = threading.Thread(target=self._run, name="tundish-pool-results", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="tundish-pool-workers", daemon=True)
        # Runs before `multiprocessing` waits for its children at the end of the interpreter, or of a worker.
        self._at_exit = util.Finalize(None, _end_at_exit, (weakref.ref(self),), exitpriority=100)

    def start(self) -> None:
        """Start the threads, which start the workers.

        Raises:
            RuntimeError: the system has no thread left.
        """
        try:
            self._runner.start()
        except BaseException:
            self.end()
            raise

    def join(self) -> None:
        """Wait until the pool has ended. A call on a thread of the pool, as in a callback, returns at once."""
        if threading.current_thread() not in (self._runner, self._watcher):
            try:
                self._runner.join()
            except BaseException:
                # Ctrl-C: the remaining tasks are not wanted any more.
                self.end()
                raise

    def end(self) -> None:
        """End the pool by force, and wait until it has ended."""
        self._dispatcher.close(cancel=True, stuck_timeout=0, is_forced=True)
        self._force()
        if threading.current_thread() not in (self._runner, self._watcher):
            # Does the work if the thread was not started.
            self._run()
            if self._runner.ident is not None:
                # Ctrl-C may have left the lock of a future held, and the thread then waits for ever. It is a daemon,
                # and the workers end with this process.
                self._runner.join(_ENDING_SECONDS)

    # ---- The thread that runs the dispatcher ----

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        is_over = False
        try:
            self._watcher.start()
            is_over = self._dispatcher.run()
        except BaseException as error:  # noqa: BLE001 (raised in all threads that wait for the pool)
            self._dispatcher.break_down(f"the pool is broken: {error!r}")
        self._queue.stop()
        if is_over:
            timeout = self._dispatcher.stuck_timeout
            patience = _ENDING_SECONDS if timeout is None else min(timeout, _ENDING_SECONDS)
            self._end_by(time.monotonic() + patience)
        else:
            self._force()
        if self._watcher.ident is not None:
            self._watcher.join()
        else:
            self._workers.close()
        self._at_exit.cancel()
        self._control.close()
        os.close(self._wake)
        self._dispatcher.finish()

    def _force(self) -> None:
        self._is_forced = True
        self._end_by(time.monotonic())

    def _end_by(self, deadline: float) -> None:
        self._deadline = deadline
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # ---- The thread that watches the workers ----

    def _watch(self) -> None:
        try:
            for worker in range(self._count):
                self._start(worker)
            while self._starting or self._ready or self._deadline is None:
                if self._deadline is not None:
                    # A worker that is not ready has no task, and may import for seconds.
                    self._read_messages()
                    self._kill(self._starting)
                self._wait()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._kill(self._starting | self._ready)
        except WorkersLostError as error:
            # Workers cannot be killed any more; they end when the socket is closed.
            self._control.close()
            self._break_down(str(error))
        except Exception as error:  # noqa: BLE001 (raised in all threads that wait for a task)
            self._break_down(f"its workers cannot be watched any more: {error!r}")
        finally:
            self._workers.close()

    def _start(self, worker: int) -> None:
        try:
            self._workers.start(worker)
        except Exception as error:
            raise WorkersLostError(f"a worker cannot be started: {error}") from error
        self._starting.add(worker)

    def _kill(self, workers: set[int]) -> None:
        for worker in workers - self._killed:
            self._workers.kill(worker)
            self._killed.add(worker)

    def _wait(self) -> None:
        """Wait for a message, an exit or the deadline, and handle it."""
        poll = select.poll()
        for number in (self._control.fileno(), self._wake, *self._workers.descriptors()):
            poll.register(number, select.POLLIN)
        poll.poll(None if self._deadline is None else max(0.0, self._deadline - time.monotonic()) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        # A worker's messages before its exit.
        self._read_messages()
        for exited in self._workers.exits():
            self._reap(exited)

    def _read_messages(self) -> None:
        for message in self._control.messages():
            if message.what == FAILED:
                self._reason = message.text
            elif message.what == READY and message.worker in self._starting:
                self._starting.discard(message.worker)
                self._ready.add(message.worker)
                del self._failed_starts[message.worker]

    def _reap(self, exited: WorkerExit) -> None:
        was_ready = exited.worker in self._ready
        self._ready.discard(exited.worker)
        self._starting.discard(exited.worker)
        lost = self._queue.reap(exited.worker)
        self._dispatcher.lose(lost, lambda task: self._error(task, exited))
        self._control.forget(exited.pid)
        if self._deadline is not None:
            return
        if not was_ready:
            is_killed = exited.pid != 0 and exited.status == -signal.SIGKILL
            self._failed_starts[exited.worker] += _KILLED_START if is_killed else _FAILED_START
        if self._failed_starts[exited.worker] >= _MAX_POINTS:
            self._break_down(f"workers do not start: the last one {exited}. {self._reason}".rstrip())
        else:
            self._start(exited.worker)

    def _error(self, task: str, exited: WorkerExit) -> Exception:
        if self._is_forced:
            reason = f"the pool was ended while worker process {exited.pid} ran it"
        else:
            reason = f"while it ran, its worker, process {exited.pid}, {exited}"
        return WorkerDiedError(
            f"{task} has no result: {reason}; it is not tried again", exited.pid, exited.status
        )

    def _break_down(self, reason: str) -> None:
        self._force()
        self._dispatcher.break_down(f"the pool is broken: {reason}")

    def end_at_exit(self) -> None:
        """Finish all tasks at the end of the interpreter; after Ctrl-C, end at once."""
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            self.end()
        else:
            self._dispatcher.close(cancel=False, stuck_timeout=STUCK_TIMEOUT_SECONDS)
            self.join()


def _end_at_exit(known: weakref.ref[Supervisor]) -> None:
    # The threads of a supervisor keep it alive while its pool runs.
    supervisor = known()
    if supervisor is not None:
        supervisor.end_at_exit()
