"""Starts, watches, replaces and ends the workers of a pool.

`SpawnedWorkers` starts them by a `multiprocessing` context. `ForkServer` is for `fork`: a process that does nothing but
fork workers. The fork server of Python imports the function and unpickles its arguments. This one is forked from the
process that makes the pool, at that moment. All workers, also the later ones, see the function and the arguments as
they were then, without a pickle or a copy. The process that made the pool is not forked again: it may have threads.

A `Supervisor` has two threads. One runs the dispatcher, and ends the pool when that returns. The other watches the
workers. The threads keep the resources of the pool, and release them when the pool ends.

Invariants:

- Each exit is reported once, with the exit status. A dead worker is reaped on the queue first, so that its task fails
  and no thread waits for it.
- A child is started with SIGINT blocked; it unblocks the signal once it ignores it.
- No thread of the parent writes a log record while the fork server is forked, because the child could not write any.
- The fork server has one thread. It alone reaps and signals its workers, so it never signals another process that has
  got the id of a dead worker. When the parent ends, it kills the workers that are left and ends.
- When the watching thread ends, no worker lives.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Final

from tundish import _native
from tundish.errors import WorkerDiedError
from tundish.shm.dispatcher import Dispatcher
from tundish.shm.messages import FAILED, READY, WorkerMessages
from tundish.shm.worker import ParentLink, SendableFunction, serve


class WorkersLostError(Exception):
    """Workers can neither be started nor watched any more."""


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """The exit of a worker's process. `status` is the exit code, or minus the number of the signal that killed it.

    If no process could be started, `pid` is 0 and `status` is the error number of the system.
    """

    worker: int
    pid: int
    status: int

    def __str__(self) -> str:
        if self.pid == 0:
            return f"could not be forked: {os.strerror(self.status)}"
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        name = str(-self.status)
        with contextlib.suppress(ValueError):
            name = signal.Signals(-self.status).name
        hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"


class WorkerProcesses:
    """The worker processes that this process has started, by number."""

    def __init__(self) -> None:
        self._processes: dict[int, BaseProcess] = {}
        # A pidfd, since descendants of a dead worker may keep its sentinel open.
        self._pidfds: dict[int, int] = {}

    def add(self, worker: int, process: BaseProcess) -> None:
        """Watch a process that was started."""
        self._processes[worker] = process
        self._pidfds[worker] = os.pidfd_open(process.pid)  # type: ignore[arg-type]  # it was started

    def descriptors(self) -> Collection[int]:
        """Return descriptors that are readable when `exits` has something to report."""
        return self._pidfds.values()

    def exits(self) -> list[WorkerExit]:
        """Return the exits since the last call."""
        found = []
        for worker, process in list(self._processes.items()):
            status = process.exitcode
            if status is not None and process.pid is not None:
                found.append(WorkerExit(worker=worker, pid=process.pid, status=status))
                self._remove(worker)
        return found

    def kill(self, worker: int) -> None:
        if worker in self._processes:
            self._processes[worker].kill()

    def close(self) -> None:
        for worker in list(self._processes):
            self.kill(worker)
            self._remove(worker)

    def forget(self) -> None:
        """Drop everything in a child made by `fork`: the processes are not its own."""
        self._processes.clear()
        for number in self._pidfds.values():
            os.close(number)
        self._pidfds.clear()

    def _remove(self, worker: int) -> None:
        self._processes.pop(worker).join()
        if worker in self._pidfds:
            os.close(self._pidfds.pop(worker))


class SpawnedWorkers(WorkerProcesses):
    """Workers by `spawn` or `forkserver`."""

    def __init__(self, context: BaseContext, function: SendableFunction, link: ParentLink) -> None:
        super().__init__()
        self._context = context
        # None after `close`, so that the memory of the arguments is freed.
        self._function: SendableFunction | None = function
        self._link = link

    def start(self, worker: int) -> None:
        # A connection is pickled with its descriptor.
        queue, control = (Connection(os.dup(number)) for number in (self._link.queue, self._link.control))
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_run,
            args=(worker, self._link.parent, queue, control, self._function),
            name=f"tundish-worker-{worker}",
            daemon=False,
        )
        # Else `start` would do it, and unblock the signal.
        resource_tracker.ensure_running()
        start_with_interrupt_blocked(process)
        self.add(worker, process)

    def close(self) -> None:
        super().close()
        self._function = None


def _run(
    worker: int, parent: int, queue: Connection, control: Connection, function: SendableFunction
) -> None:
    link = ParentLink(queue=queue.fileno(), control=control.fileno(), parent=parent)
    serve(link, worker, function.load)


def start_with_interrupt_blocked(process: BaseProcess) -> None:
    """Start `process` with SIGINT blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            # Python warns of a fork beside threads. The child uses no lock that they may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# A log handler that is busy for longer does not hold up a pool.
_LOGGING_SECONDS = 30.0
_LOGGING_RETRY_SECONDS = 0.1
_LOST = "the process that forks workers has ended"


class ForkServer:
    """The parent's side of the fork server; it has the methods of `SpawnedWorkers`. A worker runs `run_worker(worker)`.

    Raises:
        OSError: the process cannot be forked.
    """

    def __init__(self, run_worker: Callable[[int], None]) -> None:
        self._connection, servers_end = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve,
            args=(servers_end, self._connection, os.getpid(), run_worker),
            name="tundish-fork-server",
        )
        self._process.daemon = False
        try:
            _check_descriptors()
            with _no_log_record_in_progress():
                start_with_interrupt_blocked(self._process)
        except BaseException:
            if self._process.pid is not None:
                self.close()
            self._connection.close()
            raise
        finally:
            servers_end.close()

    def start(self, worker: int) -> None:
        self._send("start", worker)

    def kill(self, worker: int) -> None:
        self._send("kill", worker)

    def descriptors(self) -> Collection[int]:
        return (self._connection.fileno(),)

    def exits(self) -> list[WorkerExit]:
        found: list[WorkerExit] = []
        try:
            while self._connection.poll():
                worker, pid, status = self._connection.recv()
                found.append(WorkerExit(worker=worker, pid=pid, status=status))
        except (EOFError, OSError) as error:
            raise WorkersLostError(_LOST) from error
        return found

    def close(self) -> None:
        with contextlib.suppress(WorkersLostError):
            self._send("end", 0)
        self._process.join()
        self._connection.close()

    def _send(self, what: str, worker: int) -> None:
        try:
            self._connection.send((what, worker))
        except OSError as error:
            raise WorkersLostError(_LOST) from error


@contextlib.contextmanager
def _no_log_record_in_progress() -> Iterator[None]:
    """Hold the locks of all log handlers in the block, for a fork.

    A thread that writes to a file holds a lock inside the file object, which a forked child could never take. Nothing
    renews that lock in the child, as `logging` does with its own.
    """
    until = time.monotonic() + _LOGGING_SECONDS
    while True:
        with contextlib.ExitStack() as held:
            if _hold_log_handlers(held) or time.monotonic() >= until:
                yield
                return
        # Another thread holds one of these locks and may want another.
        time.sleep(_LOGGING_RETRY_SECONDS / 10)


def _hold_log_handlers(held: contextlib.ExitStack) -> bool:
    """Take the lock of each log handler; returns False if one of them is busy for long."""
    # First, as `logging.config` takes them, and as `logging` does before a fork.
    held.enter_context(logging._lock)  # type: ignore[attr-defined]
    for known in list(logging._handlerList):  # type: ignore[attr-defined]
        handler = known()
        if handler is not None and handler.lock is not None:
            if not handler.lock.acquire(timeout=_LOGGING_RETRY_SECONDS):
                return False
            held.callback(handler.lock.release)
    return True


def _check_descriptors() -> None:
    """Raise `OSError` unless two pipes can be opened. `multiprocessing` leaks the first if the second fails."""
    with contextlib.ExitStack() as opened:
        for _ in range(4):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _serve(
    connection: Connection, parents_end: Connection, parent: int, run_worker: Callable[[int], None]
) -> None:
    """Fork and kill workers on request, and report their exits, until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parents_end.close()
    # A garbage collection would write to, and so copy, the pages of the shared arguments.
    gc.disable()
    gc.freeze()
    workers = WorkerProcesses()
    with contextlib.ExitStack() as stack:
        stack.callback(workers.close)
        # An error of the connection means that the parent has ended.
        stack.enter_context(contextlib.suppress(EOFError, OSError))
        # A pidfd, since other children of the parent may keep its end of the connection open.
        parents_pidfd = os.pidfd_open(parent)
        while os.getppid() == parent:
            poll = select.poll()
            for number in (connection.fileno(), parents_pidfd, *workers.descriptors()):
                poll.register(number, select.POLLIN)
            poll.poll()
            for exited in workers.exits():
                connection.send((exited.worker, exited.pid, exited.status))
            while connection.poll():
                what, worker = connection.recv()
                if what == "end":
                    return
                if what == "kill":
                    workers.kill(worker)
                else:
                    _fork(worker, connection, workers, run_worker)


def _fork(
    worker: int, connection: Connection, workers: WorkerProcesses, run_worker: Callable[[int], None]
) -> None:
    def run() -> None:
        workers.forget()
        connection.close()
        gc.enable()
        run_worker(worker)

    process: Any = multiprocessing.get_context("fork").Process(target=run, name=f"tundish-worker-{worker}")
    process.daemon = False
    try:
        process.start()
    except OSError as error:
        connection.send((worker, 0, error.errno or 1))
    else:
        workers.add(worker, process)


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
