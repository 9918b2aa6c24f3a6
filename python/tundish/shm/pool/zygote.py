"""Workers by fork, from a process that does nothing else.

Owns the zygote: a child that is forked once, when a pool binds its function, and forks the workers when it is told to.
What always holds:

1. The process that made the pool is forked once. Later its threads and its changed arrays are nobody's business:
   workers, also those that replace dead ones, see what was bound.
2. The zygote has one thread and reaps its workers, so that it alone signals them: never a stranger with the same
number.
3. When its parent is gone, whatever the way, it kills the workers that are left and ends.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable, Collection
from multiprocessing.process import BaseProcess
from typing import Final

from tundish.errors import PoolError
from tundish.shm.pool.ends import Line
from tundish.shm.pool.starting import end, start_quietly
from tundish.shm.pool.workforce import Death, WorkforceLostError

__all__ = ["Zygote"]

_START: Final = b"S"
_KILL: Final = b"K"
_STARTED: Final = b"B"
_DIED: Final = b"D"
# What, worker, process id, status.
_MESSAGE = struct.Struct("=cIqq")


class Zygote:
    """The parent's side. There is no process before `begin`.

    `work(worker)` is what a worker runs, in a process of its own.
    """

    def __init__(self, work: Callable[[int], None]) -> None:
        self._line = Line()
        # Of hundreds of workers more than the line has room for: the rest follows when the zygote has said something.
        self._unsent: deque[bytes] = deque()
        self._pids: dict[int, int] = {}
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_Nursery(self._line.child, work).run, name="tundish-zygote", daemon=False
        )

    def begin(self) -> None:
        """Fork the zygote. Once, and by whoever is sure to call `close`: Ctrl-C may come when there is a process."""
        try:
            start_quietly(self._process, is_forked=True)
        except OSError as error:
            raise PoolError(f"this process cannot be forked: {error}") from error
        self._line.child.close()
        self._line.parent.setblocking(False)

    def start(self, worker: int) -> None:
        self._tell(_START, worker)

    def kill(self, worker: int) -> None:
        self._tell(_KILL, worker)

    def descriptors(self) -> Collection[int]:
        return (self._line.parent.fileno(),)

    def deaths(self) -> list[Death]:
        found: list[Death] = []
        while True:
            try:
                message = self._line.parent.recv(_MESSAGE.size)
            except BlockingIOError:
                self._send()
                return found
            except OSError:
                message = b""
            if not message:
                raise WorkforceLostError("the process that forks workers is gone")
            what, worker, pid, status = _MESSAGE.unpack(message)
            if what == _STARTED:
                self._pids[worker] = pid
            else:
                found.append(Death(worker=worker, pid=self._pids.pop(worker, pid), status=status))

    def close(self) -> None:
        self._line.close()
        if self._process.pid is not None:
            end(self._process)

    def _tell(self, what: bytes, worker: int) -> None:
        self._unsent.append(_MESSAGE.pack(what, worker, 0, 0))
        self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._line.parent.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise WorkforceLostError("the process that forks workers is gone") from error


class _Nursery:
    """The zygote's side."""

    def __init__(self, line: socket.socket, work: Callable[[int], None]) -> None:
        self._line = line
        self._work = work
        self._parent = os.getpid()
        self._workers: dict[int, BaseProcess] = {}

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        # What was bound stays as it is: no collection touches, and so copies, its pages.
        gc.disable()
        gc.freeze()
        wake = _Wake()
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.register(wake.reader, select.POLLIN)
        with contextlib.suppress(AttributeError, OSError):
            # Where something holds a copy of the parent's end all the same.
            poll.register(os.pidfd_open(self._parent), select.POLLIN)
        try:
            while os.getppid() == self._parent:
                poll.poll()
                wake.clear()
                self._report_deaths()
                if not self._obey(wake):
                    return
        except (BrokenPipeError, ConnectionResetError):
            # Told to a parent that is gone.
            return
        finally:
            for process in self._workers.values():
                process.kill()
                end(process)

    def _obey(self, wake: _Wake) -> bool:
        """Do what the parent asks for; False when it is gone."""
        try:
            message = self._line.recv(_MESSAGE.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not message:
            return False
        what, worker, _, _ = _MESSAGE.unpack(message)
        if what == _KILL:
            if worker in self._workers:
                self._workers[worker].kill()
            return True
        process = multiprocessing.get_context("fork").Process(
            target=self._be_worker, args=(worker, wake), name=f"tundish-worker-{worker}"
        )
        process.daemon = False
        try:
            process.start()
        except OSError as error:
            self._line.send(_MESSAGE.pack(_DIED, worker, 0, error.errno or 1))
            return True
        self._workers[worker] = process
        self._line.send(_MESSAGE.pack(_STARTED, worker, process.pid, 0))
        return True

    def _report_deaths(self) -> None:
        for worker, process in list(self._workers.items()):
            status = process.exitcode
            if status is not None:
                del self._workers[worker]
                self._line.send(_MESSAGE.pack(_DIED, worker, process.pid, status))
                end(process)

    def _be_worker(self, worker: int, wake: _Wake) -> None:
        wake.close()
        self._line.close()
        self._workers.clear()
        gc.enable()
        self._work(worker)


class _Wake:
    """A pipe that becomes readable when a child ends."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A signal without a handler of Python's is not written to the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self.reader)
        os.close(self._writer)
