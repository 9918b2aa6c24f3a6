"""Who leaves a pass before its end, told to the others through the job's store.

What always holds:

1. No caller waits for the store; threads that nobody needs do, and one that it does not answer is left behind.
2. What is told of one pass is not taken for another's. Of several who leave it, the one with the fewest rounds is told
   of, whoever was first to say so: the others go on without any of them.
3. All loaders of a process share one connection, one request at a time: the store looks up the name of whoever
   connects, which takes seconds where a name server does not answer, and serves nobody meanwhile.
4. However many watch in a job, together they leave the store to its other work: they ask for one key, which says
   whether there is news at all, once for all loaders of a process, and the less often the more processes do.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from tundish.distributed import JobStore, torch_distributed
from tundish.scatter.telling import is_telling, tell_aside
from tundish.waiting import Moment, Thread

__all__ = ["StopWatch", "Stops", "pause_among"]

# How often whoever watches asks, where few do.
_ASK_SECONDS = 0.05
# How often all sources of a job may ask together, in a second, and how often all who are behind the end of the data: a
# tenth of what a TCPStore serves.
_MOST_A_SECOND = 5_000
# What changes whenever something is told, of any loader.
_NEWS = "news"
_NOT_ASKED = ""
# After how many passes nobody is in one any more, and what was told of it is forgotten.
_PASSES_KEPT = 4


def pause_among(watchers: int) -> float:
    """After how many seconds one of so many who watch in a job asks again."""
    return max(_ASK_SECONDS, watchers / _MOST_A_SECOND)


class _Line:
    """A process's connection to the job's store."""

    def __init__(self, store: Any) -> None:
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._store = store
        self._connection: JobStore | None = None
        self._news: str | None = None
        self._asked_at = -math.inf

    def tell(self, key: str, rank: int, rounds: int) -> None:
        """Have `key` say that `rank` left after so many rounds, unless it says so of one who left after fewer."""
        mine = f"{rank} {rounds}"
        with self._connected() as store:
            while _rounds_of(told := store.write_once(key, mine)) > rounds:
                store.replace(key, told, mine)
            # Last, as whoever hears of it reads the key. Those who had nothing to add are in it.
            if told == mine:
                store.add(_NEWS, 1)

    def news(self, pause: float) -> tuple[str | None, float]:
        """What differs when something was told since, no older than `pause` seconds, and when that will be."""
        with self._connected() as store:
            # Another loader's watch may just have asked.
            if time.monotonic() >= self._asked_at + pause:
                self._news = store.read(_NEWS)
                self._asked_at = time.monotonic()
            return self._news, max(0.0, self._asked_at + pause - time.monotonic())

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
    world = torch_distributed().group.WORLD
    line = _lines.get(world)
    # A connection that came over a fork is the parent's.
    if line is None or line.process != os.getpid():
        line = _lines[world] = _Line(store)
    return line


class Stops:
    """Of the passes of one loader. `store`: the job's; `name`: of the loader, the same on all ranks.

    `watchers`: how many of the job's ranks may watch when this one does.
    """

    def __init__(self, store: Any, name: str, rank: int, *, watchers: int) -> None:
        self._line = _line(store)
        self._name = name
        self._rank = rank
        self._pause = pause_among(watchers)
        # They begin together, and are not to ask together.
        self._first = self._pause * (rank % watchers + 1) / watchers

    def announce(self, number: int, rounds: int) -> None:
        """Tell that this rank leaves this pass after so many rounds."""
        tell_aside(
            lambda: self._line.tell(f"{self._name}/{number}", self._rank, rounds), "tundish-dispatch-stop"
        )

    def watch(self, number: int) -> StopWatch:
        """Look from now on whether somebody leaves this pass."""
        return StopWatch(self._line, self._name, number, pause=self._pause, first=self._first)


class StopWatch:
    """Looks whether somebody leaves a pass, until it is closed or nobody has it.

    `pause`: after how many seconds it looks again; `first`: and after how many for the first time.
    """

    def __init__(self, line: _Line, name: str, number: int, *, pause: float, first: float) -> None:
        self._seen = _Seen()
        # Before there is a thread: Ctrl-C may come as soon as there is one.
        self._end = weakref.finalize(self, self._seen.over.come)
        thread = Thread(_look, "tundish-dispatch-watch", (self._seen, line, name, number, pause, first))
        thread.start()
        is_telling(thread)

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


def _look(seen: _Seen, line: _Line, name: str, number: int, pause: float, wait: float) -> None:
    known: str | None = _NOT_ASKED
    with contextlib.suppress(Exception):
        line.forget(f"{name}/{number - _PASSES_KEPT}")
        while not seen.over.wait(wait):
            news, wait = line.news(pause)
            if news != known:
                seen.found = line.ask(f"{name}/{number}") or seen.found
                known = news


def _rounds_of(told: str) -> int:
    return int(told.split()[1])
