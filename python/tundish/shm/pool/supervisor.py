"""Starts, watches, replaces and ends the workers of a pool.

`Supervisor` owns the two threads of a pool: one runs the dispatcher, and ends the pool when that returns; the other
watches the workers. Together they hold all that the pool consists of, and let go of it when the pool is over.

Invariants:

- A dead worker is reaped on the queue before anything else: its task fails, and nothing waits for it.
- When the thread that watches ends, no worker lives.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import weakref
from collections import defaultdict
from multiprocessing import util
from typing import Final

from tundish import _native
from tundish.errors import WorkerDiedError
from tundish.shm.pool.control_socket import FAILED, READY, ControlSocket, WorkerMessage
from tundish.shm.pool.dispatcher import Dispatcher
from tundish.shm.pool.fork_server import ForkServer
from tundish.shm.pool.processes import Death, Workers, WorkersLostError

__all__ = ["STUCK_TIMEOUT_SECONDS", "Supervisor"]

STUCK_TIMEOUT_SECONDS: Final = 30.0

# So many starts in a row may fail; more where something kills the workers, which may pass.
_FAILED_STARTS: Final = 3
_KILLED_STARTS: Final = 30
# A little less than all of it: thirds are rounded.
_ENOUGH: Final = 0.99
_ENDING_SECONDS: Final = 30.0


class Supervisor:
    """The threads and workers of one pool.

    Args:
        queue: the pool's task queue.
        dispatcher: the pool's tasks.
        control: the workers' messages.
        workers: starts and kills processes.
        count: how many workers there are to be.
        max_restarts: how many dead workers are replaced; None for all.
        is_staged: start the others when the first is ready.
        hint: what may be wrong where workers do not start.
    """

    def __init__(
        self,
        queue: _native.TaskQueue,
        dispatcher: Dispatcher,
        control: ControlSocket,
        workers: Workers,
        *,
        count: int,
        max_restarts: int | None,
        is_staged: bool,
        hint: str,
    ) -> None:
        self._queue = queue
        self._dispatcher = dispatcher
        self._control = control
        self._workers = workers
        self._count = count
        self._restarts_left = max_restarts
        self._hint = hint
        self._waiting = set(range(1, count)) if is_staged else set()
        self._starting: set[int] = set()
        self._ready: set[int] = set()
        self._killed: set[int] = set()
        # Of each number, the share of what is tolerated that its workers used up before they were ready.
        self._failed_starts: defaultdict[int, float] = defaultdict(float)
        self._reason = ""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._deadline: float | None = None
        self._is_forced = False
        # Taken by `_run`, or by the thread that gives the beginning up: whichever is first.
        self._claim = threading.Lock()
        self._runner = threading.Thread(target=self._run, name="tundish-pool-results", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="tundish-pool-workers", daemon=True)
        # Before `multiprocessing` waits for its children at the end of the interpreter, or of a worker.
        self._at_exit = util.Finalize(None, _end_at_exit, (weakref.ref(self),), exitpriority=100)
        _supervisors.add(self)

    def start(self) -> None:
        """Start the threads, and by them the workers.

        Raises:
            RuntimeError: the system has no thread left.
        """
        self._runner.start()

    def join(self) -> None:
        """Wait until the pool is over. A callback, which a thread of the pool runs, does not wait."""
        if threading.current_thread() not in (self._runner, self._watcher):
            try:
                self._runner.join()
            except BaseException:
                # Ctrl-C: nobody wants the rest any more.
                self.end()
                raise

    def end(self) -> None:
        """End the pool by force and at once, and wait for that."""
        self._dispatcher.close(cancel=True, stuck_timeout=0, is_forced=True)
        self._force()
        if threading.current_thread() not in (self._runner, self._watcher):
            self._runner.join()

    def give_up(self) -> None:
        """End what `start` began, where it was interrupted or refused."""
        if self._claim.acquire(blocking=False):
            self._workers.close()
            self._close()
        else:
            self.end()

    def _close(self) -> None:
        self._at_exit.cancel()
        _supervisors.discard(self)
        self._control.close()
        os.close(self._wake)

    # ---- The thread that runs the dispatcher ----

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        is_over = False
        try:
            self._watcher.start()
            is_over = self._dispatcher.run()
        except Exception as error:  # noqa: BLE001 (told to everybody who waits for the pool)
            self._dispatcher.break_down(f"the pool is broken: {error!r}")
        if is_over:
            timeout = self._dispatcher.stuck_timeout
            self._deadline = time.monotonic() + (
                _ENDING_SECONDS if timeout is None else min(timeout, _ENDING_SECONDS)
            )
            self._queue.stop()
            self._nudge()
        else:
            self._queue.stop()
            self._force()
        if self._watcher.ident is not None:
            self._watcher.join()
        else:
            self._workers.close()
        self._close()
        self._dispatcher.finish()

    def _force(self) -> None:
        self._is_forced = True
        self._deadline = time.monotonic()
        self._nudge()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # ---- The thread that watches the workers ----

    def _watch(self) -> None:
        try:
            for worker in range(self._count):
                if worker not in self._waiting:
                    self._start(worker)
            while self._alive() or self._deadline is None:
                if self._deadline is not None:
                    self._kill_starting()
                self._wait()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._kill(self._alive())
        except WorkersLostError as error:
            # Nothing is left to kill workers: they end when this is closed.
            self._control.close()
            self._break_down(str(error))
        except Exception as error:  # noqa: BLE001 (told to everybody who waits for a task)
            self._break_down(f"its workers cannot be watched any more: {error!r}")
        finally:
            self._workers.close()

    def _alive(self) -> set[int]:
        return self._starting | self._ready

    def _start(self, worker: int) -> None:
        try:
            self._workers.start(worker)
        except Exception as error:
            raise WorkersLostError(f"a worker cannot be started: {error}") from error
        self._starting.add(worker)

    def _kill_starting(self) -> None:
        """Kill workers that are not ready: they have no task, and may import for seconds."""
        # A worker that has a task has said before that it is ready.
        self._read_messages()
        self._kill(self._starting)

    def _kill(self, workers: set[int]) -> None:
        for worker in workers - self._killed:
            self._workers.kill(worker)
            self._killed.add(worker)

    def _wait(self) -> None:
        """Wait for something to happen, and deal with it."""
        poll = select.poll()
        for number in (self._control.fileno(), self._wake, *self._workers.descriptors()):
            poll.register(number, select.POLLIN)
        poll.poll(None if self._deadline is None else max(0.0, self._deadline - time.monotonic()) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        # First what workers said, then who died.
        self._read_messages()
        for death in self._workers.deaths():
            self._reap(death)

    def _read_messages(self) -> None:
        for message in self._control.messages():
            self._read(message)

    def _read(self, message: WorkerMessage) -> None:
        if message.what == FAILED:
            self._reason = message.text
        elif message.what == READY and message.worker in self._starting:
            self._starting.discard(message.worker)
            self._ready.add(message.worker)
            self._failed_starts.pop(message.worker, None)
            while self._waiting and self._deadline is None:
                self._start(self._waiting.pop())

    def _reap(self, death: Death) -> None:
        was_ready = death.worker in self._ready
        self._ready.discard(death.worker)
        self._starting.discard(death.worker)
        lost = self._queue.reap(death.worker)
        self._dispatcher.lose(lost, lambda task: self._error(task, death))
        self._control.forget(death.pid)
        if self._deadline is not None:
            return
        if not was_ready:
            self._failed_starts[death.worker] += 1 / (_KILLED_STARTS if death.is_by_kill else _FAILED_STARTS)
        if self._failed_starts[death.worker] >= _ENOUGH:
            self._break_down(f"workers do not start: the last one {death}. {self._reason or self._hint}")
        elif self._restarts_left == 0:
            if not self._alive():
                self._break_down(f"its last worker {death}, and no more are restarted (max_restarts)")
        else:
            if self._restarts_left is not None:
                self._restarts_left -= 1
            self._start(death.worker)

    def _error(self, task: str, death: Death) -> Exception:
        if self._is_forced:
            reason = f"the pool was ended while worker process {death.pid} ran it"
        else:
            reason = f"while it ran, its worker, process {death.pid}, {death}"
        return WorkerDiedError(
            f"{task} has no result: {reason}; it is not tried again", death.pid, death.status
        )

    def _break_down(self, reason: str) -> None:
        self._force()
        self._dispatcher.break_down(f"the pool is broken: {reason}")

    # ---- The end of the interpreter, and a fork ----

    def end_at_exit(self) -> None:
        """Finish all tasks; after Ctrl-C, end at once."""
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            self.end()
        else:
            self._dispatcher.close(cancel=False, stuck_timeout=STUCK_TIMEOUT_SECONDS)
            self.join()

    def disown(self) -> None:
        """In a child made by `fork`: keep nothing of the parent's pool alive."""
        self._at_exit.cancel()
        self._dispatcher.disown()
        if isinstance(self._workers, ForkServer):
            self._workers.disown()


_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _disown_all() -> None:
    for supervisor in list(_supervisors):
        supervisor.disown()


os.register_at_fork(after_in_child=_disown_all)


def _end_at_exit(known: weakref.ref[Supervisor]) -> None:
    # Its threads keep it as long as there is anything to end.
    supervisor = known()
    if supervisor is not None:
        supervisor.end_at_exit()
