"""Rounds of a pass for its caller: made ahead by a thread, or when they are asked for.

Owns the thread. What always holds: it holds neither the loader nor its caller's iterator, so that both go when nobody
uses them; it ends with its pass, which is over for this rank when all that was sent in it was read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tundish.devices import on_this_device
from tundish.errors import TimedOutError
from tundish.scatter.loader.bounded_queue import BoundedQueue
from tundish.scatter.loader.epoch import Pass, Round
from tundish.waiting import Moment, Thread, wait_for

__all__ = ["Ahead", "Inline", "Rounds"]

# How often whoever is far enough ahead looks whether everybody is there.
_LOOK_SECONDS = 0.05
# How much longer a caller waits than the source does for somebody else, whom it then names to all.
_GRACE_SECONDS = 1.0


class Rounds(Protocol):
    """The rounds of one pass. Ctrl-C may come between any two calls, and in the middle of `start` and `take`."""

    def start(self) -> None:
        """Make them, where somebody does so ahead."""

    def take(self) -> Round | None:
        """The next one; None at the end."""

    def leave(self) -> None:
        """No more are wanted, whether they were started or not. Does not wait."""

    def join(self, seconds: float) -> bool:
        """Whether within so many seconds this rank is ready for the next pass."""

    def then(self, call: Callable[[], None]) -> None:
        """Call this when the pass is over, from whichever thread that is on."""

    @property
    def stock(self) -> tuple[int, int]:
        """How many are ready, and their bytes."""


class _Ending:
    """Whether a pass is over, and what is to be done then."""

    def __init__(self) -> None:
        self._over = Moment()
        # A loader may be collected in the middle of what holds it.
        self._lock = threading.RLock()
        self._calls: list[Callable[[], None]] = []

    def join(self, seconds: float) -> bool:
        return wait_for(self._over.wait, seconds)

    def then(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._over.has_come():
                self._calls.append(call)
                return
        call()

    def _is_over(self) -> None:
        with self._lock:
            self._over.come()
        for call in self._calls:
            call()


# Passes that are not over. Where a loader and its iterator are garbage together, what is behind them has to outlive
# them, as the others are told through it; elsewhere a thread holds on to it.
_under_way: set[Inline] = set()


class Inline(_Ending):
    """Rounds that the caller makes."""

    stock = (0, 0)

    def __init__(self, source: Pass) -> None:
        super().__init__()
        self._pass = source
        self._taken = 0
        self._is_left = False

    def start(self) -> None:
        _under_way.add(self)

    def take(self) -> Round | None:
        try:
            found = self._pass.step()
            if found is None:
                self._pass.finish()
        except BaseException:
            # Who has not been told of the error, which may be Ctrl-C anywhere, hears that this rank leaves.
            self.leave()
            raise
        if found is None:
            self._is_over()
        else:
            self._taken += 1
        return found

    def leave(self) -> None:
        if self._is_left or self._over.has_come():
            return

        def leave() -> None:
            with contextlib.suppress(Exception):
                self._pass.leave(self._taken)
            self._is_over()

        self._pass.depart(self._taken)
        # Others may be slow to take what they are told.
        try:
            Thread(leave, "tundish-dispatch").start()
        except RuntimeError:
            # An interpreter that ends starts no threads any more.
            leave()
        # Not before: whom Ctrl-C kept from it comes here once more.
        self._is_left = True

    def _is_over(self) -> None:
        _under_way.discard(self)
        super()._is_over()


class Ahead(_Ending):
    """Rounds that a thread makes: `most` ahead, of `most_bytes` together.

    `patience`: how many seconds a caller waits for a sign of life of those whom the rounds come from, and what they
    are called; None without end.
    """

    def __init__(
        self, source: Pass, *, most: int, most_bytes: int, patience: tuple[float, str] | None = None
    ) -> None:
        super().__init__()
        self._pass = source
        self._patience = patience
        self._shelf = shelf = BoundedQueue[Round](most, most_bytes)
        source.touch = shelf.touch
        # Ctrl-C may leave it open whether a thread was started; of two, one makes the rounds.
        self._is_started = False
        self._turn = threading.Lock()

    @property
    def stock(self) -> tuple[int, int]:
        return self._shelf.stock

    def start(self) -> None:
        # Where the source's loader is read.
        make = on_this_device(_make)
        Thread(make, "tundish-dispatch", (self._turn, self._pass, self._shelf, self._is_over)).start()
        self._is_started = True

    def take(self) -> Round | None:
        shelf, begin = self._shelf, time.monotonic()
        if shelf.wait(0.0) or self._patience is None:
            wait_for(shelf.wait)
            return shelf.take()
        seconds, whom = self._patience
        while not wait_for(shelf.wait, min(seconds, 1.0)):
            if time.monotonic() - max(begin, shelf.touched) > seconds + _GRACE_SECONDS:
                raise TimedOutError(
                    f"{whom} gave nothing within {seconds:.4g} s: hung, stopped, reading, or elsewhere in the program"
                )
        return shelf.take()

    def leave(self) -> None:
        if not self._shelf.is_left():
            # In this order: where Ctrl-C comes in between, whoever comes here once more does both.
            self._pass.depart(self._shelf.taken)
            self._shelf.leave()
        # Others are in the pass even so: what they send is to be read, and what they wait for is to be told.
        if not self._is_started:
            with contextlib.suppress(RuntimeError):
                self.start()


def _make(turn: threading.Lock, source: Pass, shelf: BoundedQueue[Round], over: Callable[[], None]) -> None:
    if not turn.acquire(blocking=False):
        return
    try:
        try:
            _fill(source, shelf)
            shelf.end()
        except BaseException as error:  # noqa: BLE001 (raised where rounds are taken)
            _end(source, shelf, error)
        # What is left to be read is.
        with contextlib.suppress(BaseException):
            source.leave(shelf.taken)
    finally:
        over()


def _end(source: Pass, shelf: BoundedQueue[Round], error: BaseException) -> None:
    """End with `error`, or with one that ends it earlier, as long as the caller takes what is left."""
    try:
        while True:
            most = source.rounds_before(error)
            source.depart(shelf.end(error, most=most))
            if most is None:
                # It ends for this rank alone: what the others send is to be read at once.
                return
            try:
                while not shelf.wait_for_end(_LOOK_SECONDS):
                    source.look()
            except BaseException as earlier:  # noqa: BLE001 (raised where rounds are taken)
                error = earlier
            else:
                return
    finally:
        # Else an error that was raised here holds on to the pass, and to the loop that it is raised in.
        del error


def _fill(source: Pass, shelf: BoundedQueue[Round]) -> None:
    while not shelf.is_left():
        while not shelf.wait_for_room(_LOOK_SECONDS):
            source.look()
        if shelf.is_left():
            return
        found = source.step()
        if found is None:
            # Until then somebody may leave before the end.
            while not shelf.wait_for_end(_LOOK_SECONDS):
                source.look()
            if not shelf.is_left():
                source.finish()
            return
        shelf.put(found, found.size)
        # Nobody keeps a batch alive by making the next one.
        del found
