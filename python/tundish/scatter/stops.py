"""Who leaves a pass before its end, told to the others through the job's store.

What always holds:

1. No caller waits for the store; threads that nobody needs do, and one that it does not answer is left behind.
2. What is told of one pass is not taken for another's. Of several who leave it, the one with the fewest rounds is told
   of, whoever was first to say so: the others go on without any of them.
3. All loaders of a process share one connection, one request at a time: the store looks up the name of whoever
   connects, which takes seconds where a name server does not answer, and serves nobody meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from tundish.distributed.jobstore import JobStore, distributed_module
from tundish.waiting import Moment, Thread

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


class _Line:
    """A process's connection to the job's store."""

    def __init__(self, store: Any) -> None:
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._store = store
        self._connection: JobStore | None = None

    def tell(self, key: str, rank: int, rounds: int) -> None:
        """Have `key` say that `rank` left after so many rounds, unless it says so of one who left after fewer."""
        mine = f"{rank} {rounds}"
        with self._connected() as store:
            while _rounds_of(told := store.write_once(key, mine)) > rounds:
                store.replace(key, told, mine)

    def ask(self, key: str) -> tuple[int, int] | None:
        """What `key` says: a rank, and after how many rounds it left."""
        with self._connected() as store:
            told = store.read(key)
        if told is None:
            return None
        rank, rounds = map(int, told.split())
        return rank, rounds

    def forget(self, key: str) -> None:
        """Have `key` say nothing."""
        with self._connected() as store:
            store.delete(key)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[JobStore]:
        """The connection, for the calling thread alone; kept if nothing goes wrong."""
        with self._lock:
            store, self._connection = self._connection, None
            store = store or JobStore(self._store, "tundish-dispatch")
            store.connect()
            yield store
            self._connection = store


# By the default group, with which the job's store goes.
_lines: weakref.WeakKeyDictionary[Any, _Line] = weakref.WeakKeyDictionary()


def _line(store: Any) -> _Line:
    world = distributed_module().group.WORLD
    line = _lines.get(world)
    # A connection that came over a fork is the parent's.
    if line is None or line.process != os.getpid():
        line = _lines[world] = _Line(store)
    return line


class Stops:
    """Of the passes of one loader. `store`: the job's; `name`: of the loader, the same on all ranks."""

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._line = _line(store)
        self._name = name
        self._rank = rank

    def announce(self, number: int, rounds: int) -> None:
        """Tell that this rank leaves this pass after so many rounds."""

        def tell() -> None:
            # Where the store is gone the job ends, and the others notice it otherwise.
            with contextlib.suppress(Exception):
                self._line.tell(f"{self._name}/{number}", self._rank, rounds)

        # An interpreter that ends starts no threads any more; the others see it end.
        with contextlib.suppress(RuntimeError):
            thread = Thread(tell, "tundish-dispatch-stop")
            thread.start()
            _telling.add(thread)

    def watch(self, number: int) -> StopWatch:
        """Look from now on whether somebody leaves this pass."""
        return StopWatch(self._line, self._name, number)


class StopWatch:
    """Looks whether somebody leaves a pass, until it is closed or nobody has it."""

    def __init__(self, line: _Line, name: str, number: int) -> None:
        self._seen = _Seen()
        # Before there is a thread: Ctrl-C may come as soon as there is one.
        self._end = weakref.finalize(self, self._seen.over.come)
        thread = Thread(_look, "tundish-dispatch-watch", (self._seen, line, name, number))
        thread.start()
        _telling.add(thread)

    @property
    def found(self) -> tuple[int, int] | None:
        """The rank that left after the fewest rounds, and how many."""
        return self._seen.found

    def close(self) -> None:
        """Look no longer."""
        self._end()


class _Seen:
    """What a watch and its thread have in common."""

    def __init__(self) -> None:
        self.found: tuple[int, int] | None = None
        self.over = Moment()


def _look(seen: _Seen, line: _Line, name: str, number: int) -> None:
    with contextlib.suppress(Exception):
        line.forget(f"{name}/{number - _PASSES_KEPT}")
        while not seen.over.wait(_ASK_SECONDS):
            seen.found = line.ask(f"{name}/{number}") or seen.found


def _rounds_of(told: str) -> int:
    return int(told.split()[1])
