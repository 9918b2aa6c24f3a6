"""Worker processes of one `multiprocessing` context: starts, watches and kills them by their numbers.

Invariants:

- Each exit is reported once, with the exit status.
- A child is started with SIGINT blocked; it unblocks the signal once it ignores it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from tundish.shm.pool.bound_function import SendableFunction
from tundish.shm.pool.worker import ParentLink, serve

__all__ = [
    "SpawnedWorkers",
    "WorkerExit",
    "WorkerProcesses",
    "WorkersLostError",
    "start_with_interrupt_blocked",
]


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
