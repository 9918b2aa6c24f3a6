"""Who leaves a pass before its end, told to the others through the job's store.

What always holds:

1. No caller waits for the store; threads that nobody needs do, and one that it does not answer is left behind.
2. What is told of one pass is not taken for another's. Of several who leave it, the one with the fewest rounds is told
   of, whoever was first to say so: the others go on without any of them.
3. A connection is used for one pass after the other: the store may take seconds to accept one, and serves nobody
   meanwhile, since it asks for the client's name.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from tundish.distributed.jobstore import JobStore

__all__ = ["StopWatch", "Stops", "wait_for_telling"]

# How often whoever watches asks.
_ASK_SECONDS = 0.05
# After how many passes nobody is in one any more, and what was told of it is forgotten.
_PASSES_KEPT = 4

# Threads that are in the store, or may be.
_telling: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def wait_for_telling(seconds: float) -> None:
    """Wait until nobody is in the store any more: a thread that is when the interpreter ends aborts it."""
    for thread in list(_telling):
        thread.join(seconds)


class Stops:
    """Of the passes of one loader. `store`: the job's; `name`: of the loader, the same on all ranks."""

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._idle: list[JobStore] = []
        self._is_closed = False

    def announce(self, number: int, rounds: int) -> None:
        """Tell that this rank leaves this pass after so many rounds."""

        def tell() -> None:
            key, mine = str(number), f"{self._rank} {rounds}"
            # Where the store is gone the job ends, and the others notice it otherwise.
            with contextlib.suppress(Exception), self._connected() as store:
                while _rounds_of(told := store.write_once(key, mine)) > rounds:
                    store.replace(key, told, mine)

        # An interpreter that ends starts no threads any more; the others see it end.
        with contextlib.suppress(RuntimeError):
            thread = threading.Thread(target=tell, name="tundish-dispatch-stop", daemon=True)
            thread.start()
            _telling.add(thread)

    def watch(self, number: int) -> StopWatch:
        """Look from now on whether somebody leaves this pass."""
        return StopWatch(self._connected(), number)

    def close(self) -> None:
        """Let go of the connections."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[JobStore]:
        """A connection for the calling thread alone; kept for the next one if nothing goes wrong."""
        try:
            store = self._idle.pop()
        except IndexError:
            store = JobStore(self._store, self._name)
        store.connect()
        yield store
        self._idle.append(store)
        if self._is_closed:
            self.close()


class StopWatch:
    """Looks whether somebody leaves a pass; `found` is the rank that did so after the fewest rounds, and how many."""

    def __init__(self, connected: contextlib.AbstractContextManager[JobStore], number: int) -> None:
        self.found: tuple[int, int] | None = None
        self._connected = connected
        self._number = number
        self._over = threading.Event()
        thread = threading.Thread(target=self._look, name="tundish-dispatch-watch", daemon=True)
        thread.start()
        _telling.add(thread)

    def close(self) -> None:
        """Look no longer."""
        self._over.set()

    def _look(self) -> None:
        key = str(self._number)
        with contextlib.suppress(Exception), self._connected as store:
            store.delete(str(self._number - _PASSES_KEPT))
            while not self._over.wait(_ASK_SECONDS):
                told = store.read(key)
                if told is not None:
                    rank, rounds = map(int, told.split())
                    self.found = rank, rounds


def _rounds_of(told: str) -> int:
    return int(told.split()[1])
