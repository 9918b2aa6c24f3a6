"""Workers by fork, from a process that does nothing else.

Python's own fork server imports the function and unpickles its arguments. This one is forked from the process that
makes the pool, when it makes it: workers, also those that replace dead ones, see the function and the arguments as they
were then, without a pickle or a copy. The process itself is never forked again, whatever threads it has by then.

Invariants:

- The fork server has one thread and reaps its workers, so it alone signals them: never a stranger with the same number.
- When the parent is gone, whatever the way, the fork server kills the workers that are left and ends.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

from tundish.errors import PoolError
from tundish.shm.pool.processes import (
    Death,
    WorkerProcesses,
    WorkersLostError,
    join_and_close,
    start_with_interrupt_blocked,
)

__all__ = ["ForkServer"]

# As many descriptors as two pipes have: `multiprocessing` leaves the first open where there is none for the second.
_DESCRIPTORS = 4


class ForkServer:
    """The parent's side. `run_worker(worker)` is what a worker runs.

    Raises:
        PoolError: the process cannot be forked.
    """

    def __init__(self, run_worker: Callable[[int], None]) -> None:
        self._connection, servers_end = multiprocessing.Pipe()
        parent = os.getpid()
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve,
            args=(servers_end, self._connection, parent, run_worker),
            name="tundish-fork-server",
        )
        self._process.daemon = False
        try:
            _check_descriptors()
            start_with_interrupt_blocked(self._process)
        except BaseException as error:
            self._connection.close()
            if self._process.pid is not None:
                join_and_close(self._process)
            if isinstance(error, OSError):
                raise PoolError(f"this process cannot be forked: {error}") from error
            raise
        finally:
            servers_end.close()

    def start(self, worker: int) -> None:
        """See `Workers`."""
        self._send("start", worker)

    def kill(self, worker: int) -> None:
        """See `Workers`."""
        self._send("kill", worker)

    def descriptors(self) -> Collection[int]:
        """See `Workers`."""
        return (self._connection.fileno(),)

    def deaths(self) -> list[Death]:
        """See `Workers`."""
        found: list[Death] = []
        try:
            while self._connection.poll():
                worker, pid, status = self._connection.recv()
                found.append(Death(worker=worker, pid=pid, status=status))
        except (EOFError, OSError) as error:
            raise _lost() from error
        return found

    def close(self) -> None:
        """See `Workers`."""
        self._connection.close()
        join_and_close(self._process)

    def disown(self) -> None:
        """In a child made by `fork`: the server sees its parent end by the end of this connection."""
        self._connection.close()

    def _send(self, what: str, worker: int) -> None:
        try:
            self._connection.send((what, worker))
        except OSError as error:
            raise _lost() from error


def _lost() -> WorkersLostError:
    return WorkersLostError("the process that forks workers is gone")


def _check_descriptors() -> None:
    opened: list[int] = []
    try:
        while len(opened) < _DESCRIPTORS:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for number in opened:
            os.close(number)


def _serve(
    connection: Connection, parents_end: Connection, parent: int, run_worker: Callable[[int], None]
) -> None:
    """Fork and kill workers as the parent asks, and report their deaths, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parents_end.close()
    # No collection touches, and so copies, the pages of what was bound.
    gc.disable()
    gc.freeze()
    workers = WorkerProcesses()
    with contextlib.ExitStack() as stack:
        stack.callback(workers.close)
        # An error of the connection: the parent is gone.
        stack.enter_context(contextlib.suppress(EOFError, OSError))
        parents_pidfd: list[int] = []
        with contextlib.suppress(AttributeError, OSError):
            # Where something holds a copy of the parent's end all the same.
            parents_pidfd.append(os.pidfd_open(parent))
        while os.getppid() == parent:
            poll = select.poll()
            for number in (connection.fileno(), *parents_pidfd, *workers.descriptors()):
                poll.register(number, select.POLLIN)
            poll.poll()
            for death in workers.deaths():
                connection.send((death.worker, death.pid, death.status))
            while connection.poll():
                _obey(connection, workers, run_worker)


def _obey(connection: Connection, workers: WorkerProcesses, run_worker: Callable[[int], None]) -> None:
    what, worker = connection.recv()
    if what == "kill":
        workers.kill(worker)
        return

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
