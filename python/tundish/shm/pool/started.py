"""Workers by `spawn` and `forkserver`, through `multiprocessing`.

Owns the process objects. What always holds: workers get what was bound from shared memory and from one pickle that was
made when the pool was; a worker's descriptors are those that its parent meant for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from tundish.shm.pool.binding import Placed
from tundish.shm.pool.starting import end, start_quietly
from tundish.shm.pool.worker import Link, serve
from tundish.shm.pool.workforce import Death

__all__ = ["StartedWorkers"]


class StartedWorkers:
    """Processes of one context."""

    def __init__(
        self, context: BaseContext, placed: Placed, *, board: int, lifeline: int, voice: int, room: int
    ) -> None:
        self._context = context
        self._placed = placed
        self._board, self._lifeline, self._voice, self._room = board, lifeline, voice, room
        self._processes: dict[int, BaseProcess] = {}
        # What becomes readable at a death: the process itself, where the system has such descriptors and it is ours.
        self._watches: dict[int, int] = {}

    def start(self, worker: int) -> None:
        lent = _Lent(
            worker=worker,
            board=_Descriptor(self._board),
            lifeline=_Descriptor(self._lifeline),
            voice=_Descriptor(self._voice),
            parent=os.getpid(),
            room=self._room,
        )
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_work, args=(lent, self._placed), name=f"tundish-worker-{worker}", daemon=False
        )
        start_quietly(process, is_forked=False)
        self._processes[worker] = process
        if self._context.get_start_method() == "spawn":
            # Descendants of a worker may hold its sentinel open beyond its death.
            with contextlib.suppress(AttributeError, OSError):
                self._watches[worker] = os.pidfd_open(process.pid)

    def descriptors(self) -> Collection[int]:
        return [self._watches.get(worker, process.sentinel) for worker, process in self._processes.items()]

    def deaths(self) -> list[Death]:
        found = []
        for worker, process in list(self._processes.items()):
            status = process.exitcode
            if status is not None and process.pid is not None:
                found.append(Death(worker=worker, pid=process.pid, status=status))
                del self._processes[worker]
                if worker in self._watches:
                    os.close(self._watches.pop(worker))
                end(process)
        return found

    def kill(self, worker: int) -> None:
        if worker in self._processes:
            self._processes[worker].kill()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            end(process)
        for watch in self._watches.values():
            os.close(watch)
        self._placed.close()


class _Descriptor:
    """A descriptor that arrives in the process that is being started."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (reduction.DupFd(self._number),)


def _arrived(duplicate: Any) -> int:
    number: int = duplicate.detach()
    os.set_inheritable(number, False)
    return number


@dataclass(frozen=True, kw_only=True)
class _Lent:
    """A `Link` on its way: where it arrives, descriptors are numbers."""

    worker: int
    board: Any
    lifeline: Any
    voice: Any
    parent: int
    room: int


def _work(lent: _Lent, placed: Placed) -> None:
    serve(Link(**vars(lent)), placed.call)
