"""What a pool needs of the processes that work for it, however they are started.

Owns no process; `zygote.py` and `started.py` do. What always holds there: a death is reported once, with the exit
status, and a worker that was killed on request is reported as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Death", "Workforce", "WorkforceLostError"]


class WorkforceLostError(Exception):
    """Nobody is left who could start workers or tell of their deaths."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """The end of the process of one worker; `status` as `multiprocessing` counts it: minus the signal, or the code.

    `pid` is 0 where no process came about; `status` is the system's error then.
    """

    worker: int
    pid: int
    status: int

    @property
    def is_by_kill(self) -> bool:
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


class Workforce(Protocol):
    """Processes, by the numbers of workers."""

    def start(self, worker: int) -> None:
        """Begin to start the process of a worker that has none."""

    def descriptors(self) -> Collection[int]:
        """What becomes readable when `deaths` has something to say."""

    def deaths(self) -> list[Death]:
        """Who died since the last call.

        Raises:
            WorkforceLostError: nobody can say any more.
        """

    def kill(self, worker: int) -> None:
        """End a worker by force, if it lives."""

    def close(self) -> None:
        """Let go of everything; no worker lives any more."""
