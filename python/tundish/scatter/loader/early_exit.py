"""Early exits of ranks from a loop: a key in the job's store, which the source reads before each step."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import wait
from typing import Any

from tundish.daemon_thread import DaemonThread
from tundish.distributed import JobStore

__all__ = ["EarlyExits"]

# How long a rank that leaves waits for the store.
_REPORT_SECONDS = 1.0


class EarlyExits:
    """The early exits from the iterations of one loader.

    Args:
        store: the job's store.
        name: of the loader, the same on all ranks.
        rank: this rank.
    """

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store = JobStore(store, "tundish-dispatch")
        self._name = name
        self._rank = rank
        self._lock = threading.Lock()

    def report(self, iteration: int, steps: int) -> None:
        """Report that this rank left an iteration after so many steps. Errors name the first rank that left."""
        # In a thread, because a store whose host is stopped does not answer.
        with contextlib.suppress(RuntimeError):
            thread = DaemonThread("tundish-early-exit")
            wait([thread.submit(lambda: self._write(iteration, steps))], _REPORT_SECONDS)

    def find(self, iteration: int) -> tuple[int, int] | None:
        """The rank that left an iteration and its number of steps; None if none is known to have left."""
        found = None
        # Without the store the job ends, and other errors say so.
        with contextlib.suppress(Exception), self._lock:
            self._store.connect()
            found = self._store.read(self._key(iteration))
        if found is None:
            return None
        rank, steps = map(int, found.split())
        return rank, steps

    def forget(self, iteration: int) -> None:
        """Delete the key of an iteration."""
        with contextlib.suppress(Exception), self._lock:
            self._store.connect()
            self._store.delete(self._key(iteration))

    def _write(self, iteration: int, steps: int) -> None:
        with contextlib.suppress(Exception), self._lock:
            self._store.connect()
            self._store.write_once(self._key(iteration), f"{self._rank} {steps}")

    def _key(self, iteration: int) -> str:
        return f"{self._name}/{iteration}"
