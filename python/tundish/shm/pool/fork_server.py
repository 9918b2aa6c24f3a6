"""A process that does nothing but fork the workers of a pool.

The fork server of Python imports the function and unpickles its arguments. This one is forked from the process that
makes the pool, at that moment. All workers, also the later ones, see the function and the arguments as they were then,
without a pickle or a copy. The process that made the pool is not forked again, since it may have threads by then.

Invariants:

- The fork server has one thread. It alone reaps and signals its workers, so it never signals another process that has
  got the id of a dead worker.
- When the parent ends, the fork server kills the workers that are left and ends.
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

from tundish.shm.pool.processes import (
    WorkerExit,
    WorkerProcesses,
    WorkersLostError,
    start_with_interrupt_blocked,
)

__all__ = ["ForkServer"]

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
