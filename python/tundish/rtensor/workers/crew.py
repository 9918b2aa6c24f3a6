"""Calls that wait for others, several at once.

What always holds: whoever is interrupted while they are made goes on at once; nobody begins one of them afterwards; and
what is under way then ends by itself, by what it waits for.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from tundish.waiting import Moment, Thread, wait_for

__all__ = ["Crew", "Round"]

# As long as the calls come to their end.
_MOST_THREADS = 32
# And where they do not: behind those that wait for who is silent are others, whose time is to begin.
_MOST_OF_SILENT = 512
# After so long without an end twice as many calls are made at once.
_STALLED_SECONDS = 0.1
# For threads whose work was cut short.
_ENDING_SECONDS = 1.0


class Round:
    """Some calls, and what became of them, in their order. Each is given the round."""

    def __init__(self, calls: Sequence[Callable[[Round], Any]]) -> None:
        self._calls = calls
        self._numbers = itertools.count()
        self._done: list[int] = []
        self.outcomes: list[Any] = [None] * len(calls)
        self.over = Moment()
        self.is_given_up = False

    def work(self) -> None:
        """Make calls that nobody makes, until there are none."""
        while not self.is_given_up and (number := next(self._numbers)) < len(self._calls):
            try:
                self.outcomes[number] = self._calls[number](self)
            except Exception as error:  # noqa: BLE001 (the caller's to judge, beside those of the other calls)
                self.outcomes[number] = error
            self._done.append(number)
            if len(self._done) == len(self._calls):
                self.over.come()

    def left(self) -> int:
        """How many calls have not come to their end."""
        return len(self._calls) - len(self._done)

    def undone(self) -> list[int]:
        """The numbers of the calls that did not come to their end."""
        done = set(self._done)
        return [number for number in range(len(self._calls)) if number not in done]


class Crew:
    """Threads for rounds, which start with the first one."""

    def __init__(self) -> None:
        self._rounds: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._threads: list[Thread] = []

    def work(self, round_: Round) -> None:
        """Have the calls of a round made, and wait for that."""
        wanted = min(len(round_.outcomes), _MOST_THREADS)
        if wanted <= 1 or not self._start(wanted):
            round_.work()
            return
        for _ in range(wanted):
            self._rounds.put(round_)
        left = round_.left()
        while left > wanted and not wait_for(round_.over.wait, _STALLED_SECONDS):
            before, left = left, round_.left()
            more = min(wanted, left - wanted, _MOST_OF_SILENT - wanted)
            if left == before and more > 0 and self._start(wanted + more):
                for _ in range(more):
                    self._rounds.put(round_)
                wanted += more
        wait_for(round_.over.wait)

    def end(self) -> None:
        """End the threads, and wait for them, though not for long."""
        threads, self._threads = self._threads, []
        self._rounds.put(None)
        deadline = time.monotonic() + _ENDING_SECONDS
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._rounds = queue.SimpleQueue()

    def _start(self, wanted: int) -> bool:
        """Whether there is any thread: as many as are wanted, or as the system gives."""
        # A child made by `fork` has none of its parent's.
        if any(not thread.is_alive() for thread in self._threads):
            self._threads, self._rounds = [], queue.SimpleQueue()
        while len(self._threads) < wanted:
            thread = Thread(_work, "tundish-rtensor", (self._rounds,))
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)
        return bool(self._threads)


def _work(rounds: queue.SimpleQueue[Round | None]) -> None:
    while (round_ := rounds.get()) is not None:
        round_.work()
        # Else the next one's wait would hold on to it.
        del round_
    # For the next thread, which has no other news.
    rounds.put(None)
