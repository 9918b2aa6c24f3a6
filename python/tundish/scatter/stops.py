"""Who leaves a pass before its end, told to the source through the job's store.

What always holds: no caller waits for the store; threads that nobody needs do, and one that it does not answer is left
behind. What is told of one pass is not taken for another's.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

from tundish.distributed.jobstore import JobStore

__all__ = ["StopWatch", "Stops", "wait_for_telling"]

# How often the source asks.
_ASK_SECONDS = 0.05
_FAREWELL_SECONDS = 1.0


# Threads that tell somebody something.
_telling: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def wait_for_telling(seconds: float) -> None:
    """Wait until all that was announced was told: a thread that is in the store when the interpreter ends aborts it."""
    for thread in list(_telling):
        thread.join(seconds)


class Stops:
    """Of the passes of one loader. `store`: the job's; `name`: of the loader, the same on all ranks."""

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank

    def announce(self, number: int, rounds: int) -> None:
        """Tell that this rank leaves this pass after so many rounds."""

        def tell() -> None:
            # Where the store is gone the job ends, and the others notice it otherwise.
            with (
                contextlib.suppress(Exception),
                contextlib.closing(JobStore(self._store, self._name)) as store,
            ):
                store.connect()
                store.write_once(str(number), f"{self._rank} {rounds}")

        # An interpreter that ends starts no threads any more; the others see it end.
        with contextlib.suppress(RuntimeError):
            thread = threading.Thread(target=tell, name="tundish-dispatch-stop", daemon=True)
            thread.start()
            _telling.add(thread)

    def watch(self, number: int) -> StopWatch:
        """Look from now on whether somebody leaves this pass."""
        return StopWatch(self._store, self._name, str(number))


class StopWatch:
    """Looks whether somebody leaves a pass; `found` is the rank that did, and after how many rounds."""

    def __init__(self, store: Any, name: str, key: str) -> None:
        self.found: tuple[int, int] | None = None
        self._store = store
        self._name = name
        self._key = key
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="tundish-dispatch-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no longer."""
        self._over.set()
        self._thread.join(_FAREWELL_SECONDS)

    def _look(self) -> None:
        with contextlib.suppress(Exception), contextlib.closing(JobStore(self._store, self._name)) as store:
            store.connect()
            while not self._over.wait(_ASK_SECONDS):
                told = store.read(self._key)
                if told is not None:
                    rank, rounds = map(int, told.split())
                    self.found = rank, rounds
                    break
            # Nobody asks for it again.
            store.delete(self._key)
