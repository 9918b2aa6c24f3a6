"""Worker processes of one `multiprocessing` context: started, watched and killed by number.

Invariants:

- A death is reported once, with the exit status, and one by `kill` as well.
- A child is started with SIGINT blocked; it unblocks the signal once it ignores it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing import reduction, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from tundish.shm.pool.bound_function import PlacedFunction
from tundish.shm.pool.worker import WorkerLink, serve

__all__ = [
    "Death",
    "SpawnedWorkers",
    "WorkerProcesses",
    "Workers",
    "WorkersLostError",
    "join_and_close",
    "start_with_interrupt_blocked",
]


class WorkersLostError(Exception):
    """Nothing is left that could start workers or report their deaths."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a worker's process; `status` as in `multiprocessing`: minus the signal, or the exit code.

    `pid` is 0 where no process could be started; `status` is the system's error number then.
    """

    worker: int
    pid: int
    status: int

    @property
    def is_by_kill(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.pid != 0 and self.status == -signal.SIGKILL

    def __str__(self) -> str:
        if self.pid == 0:
            return f"could not be forked: {os.strerror(self.status)}"
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        name = str(-self.status)
        with contextlib.suppress(ValueError):
            name = signal.Signals(-self.status).name
        if self.is_by_kill:
            return f"was killed by {name}, as the kernel does where memory runs out"
        return f"was killed by {name}"


class Workers(Protocol):
    """Processes by the numbers of workers: `SpawnedWorkers` or a `ForkServer`."""

    def start(self, worker: int) -> None:
        """Begin to start the process of a worker that has none."""

    def descriptors(self) -> Collection[int]:
        """The descriptors that become readable when `deaths` has something to report."""

    def deaths(self) -> list[Death]:
        """Return who died since the last call.

        Raises:
            WorkersLostError: nothing can report deaths any more.
        """

    def kill(self, worker: int) -> None:
        """Kill a worker, if it lives."""

    def close(self) -> None:
        """Kill the workers that live, and let go of everything."""


class WorkerProcesses:
    """Processes of one context, children of this process."""

    def __init__(self) -> None:
        self._processes: dict[int, BaseProcess] = {}
        # Descendants of a worker may hold its sentinel open beyond its death, but not these.
        self._pidfds: dict[int, int] = {}

    def add(self, worker: int, process: BaseProcess) -> None:
        """Watch a process that was started."""
        self._processes[worker] = process
        with contextlib.suppress(AttributeError, OSError):
            self._pidfds[worker] = os.pidfd_open(process.pid)  # type: ignore[arg-type]

    def descriptors(self) -> Collection[int]:
        """See `Workers`."""
        return [self._pidfds.get(worker, process.sentinel) for worker, process in self._processes.items()]

    def deaths(self) -> list[Death]:
        """See `Workers`."""
        found = []
        for worker, process in list(self._processes.items()):
            status = process.exitcode
            if status is not None and process.pid is not None:
                found.append(Death(worker=worker, pid=process.pid, status=status))
                self._remove(worker)
        return found

    def kill(self, worker: int) -> None:
        """See `Workers`."""
        if worker in self._processes:
            self._processes[worker].kill()

    def close(self) -> None:
        """See `Workers`."""
        for worker in list(self._processes):
            self.kill(worker)
            self._remove(worker)

    def forget(self) -> None:
        """Hold nothing in a child made by `fork`, whose processes these are not."""
        self._processes.clear()
        for number in self._pidfds.values():
            os.close(number)
        self._pidfds.clear()

    def _remove(self, worker: int) -> None:
        join_and_close(self._processes.pop(worker))
        if worker in self._pidfds:
            os.close(self._pidfds.pop(worker))


class SpawnedWorkers(WorkerProcesses):
    """Workers by `spawn` or `forkserver`."""

    def __init__(self, context: BaseContext, function: PlacedFunction, link: WorkerLink) -> None:
        super().__init__()
        self._context = context
        self._function = function
        self._link = link

    def start(self, worker: int) -> None:
        """See `Workers`."""
        queue, control = _Descriptor(self._link.queue), _Descriptor(self._link.control)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_run,
            args=(worker, self._link.parent, queue, control, self._function),
            name=f"tundish-worker-{worker}",
            daemon=False,
        )
        # It is started on the way else, which unblocks the signal.
        resource_tracker.ensure_running()
        start_with_interrupt_blocked(process)
        self.add(worker, process)

    def close(self) -> None:
        """See `Workers`."""
        super().close()
        self._function.close()


class _Descriptor:
    """A descriptor that arrives, as a number, in the process that is being started."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _received, (reduction.DupFd(self._number),)


def _received(duplicate: Any) -> int:
    number: int = duplicate.detach()
    os.set_inheritable(number, False)
    return number


def _run(worker: int, parent: int, queue: int, control: int, function: PlacedFunction) -> None:
    serve(WorkerLink(queue=queue, control=control, parent=parent), worker, function.load)


def start_with_interrupt_blocked(process: BaseProcess) -> None:
    """Start `process` with SIGINT blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            # Of a fork beside threads: the child touches nothing that they may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def join_and_close(process: BaseProcess) -> None:
    """Wait until `process` is over, and let go of it."""
    process.join()
    while process.exitcode is None:
        # Another thread has reaped it, by `multiprocessing.active_children`, and is about to say so.
        time.sleep(1e-3)
    process.close()
