"""What one thread makes ready and another takes.

What always holds: at most so many things are on a shelf, and so many bytes, or one thing that is larger; an error that
ends it comes after what was put there before, or after the part of it that is still of use; whoever takes may leave,
and then the other one no longer waits for room. Ctrl-C anywhere in what the one who takes calls holds up nobody: he
waits without the lock, and takes it in no function of Python's, in which Ctrl-C would leave it taken.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from threading import Condition, RLock
from typing import Generic, TypeVar

__all__ = ["BoundedQueue"]

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """A shelf for `most` things of at most `most_bytes` together."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = RLock()
        # For the one who fills it.
        self._changed = Condition(self._lock)
        # For the one who takes: one for each thing, and for the end.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._things: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._is_left = False
        # How many things were taken.
        self.taken = 0
        # Of the last sign of life of who fills it, on the monotonic clock.
        self.touched = time.monotonic()

    def is_left(self) -> bool:
        """Whether nobody takes anything any more."""
        return self._is_left

    def touch(self) -> None:
        """Whoever fills it is there."""
        self.touched = time.monotonic()

    @property
    def stock(self) -> tuple[int, int]:
        """How many things are there, and how many bytes they have."""
        return len(self._things), self._bytes

    # For the one who fills it.

    def wait_for_room(self, seconds: float) -> bool:
        """Whether within so many seconds there is room, or the other one has left."""
        with self._lock:
            return self._changed.wait_for(
                lambda: (
                    self._is_left
                    or not self._things
                    or (len(self._things) < self._most and self._bytes < self._most_bytes)
                ),
                seconds,
            )

    def put(self, thing: T, size: int) -> None:
        """Put a thing there, whether there is room or not."""
        with self._lock:
            if not self._is_left:
                self._things.append((thing, size))
                self._bytes += size
                self._news.put(None)

    def wait_for_end(self, seconds: float) -> bool:
        """Whether within so many seconds all was taken, or the other one has left."""
        with self._lock:
            return self._changed.wait_for(lambda: self._is_left or not self._things, seconds)

    def end(self, error: BaseException | None = None, *, most: int | None = None) -> int:
        """Nothing more comes; `error` is raised when all was taken, or the first `most` things.

        Returns how many that are in all.
        """
        with self._lock:
            self._is_over, self._error = True, error
            while most is not None and self._things and self.taken + len(self._things) > most:
                self._bytes -= self._things.pop()[1]
            self._news.put(None)
            return self.taken + len(self._things)

    # For the one who takes.

    def wait(self, seconds: float) -> bool:
        """Whether within so many seconds there is something to take, or an end."""
        deadline = time.monotonic() + seconds
        while not self._things and not self._is_over:
            try:
                self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return bool(self._things) or self._is_over
        return True

    def take(self) -> T | None:
        """The next thing that is there; None at the end. Raises the error that it ends with, once."""
        with contextlib.suppress(queue.Empty):
            self._news.get_nowait()
        with self._lock:
            if self._things:
                thing, size = self._things.popleft()
                self._bytes -= size
                self.taken += 1
                self._changed.notify_all()
                return thing
            error, self._error = self._error, None
        if error is None:
            return None
        try:
            raise error
        finally:
            # Else the error holds on to what it is raised from, which is the caller's loop.
            del error

    def leave(self) -> None:
        """Take nothing any more."""
        with self._lock:
            self._is_left = True
            self._things.clear()
            self._bytes = 0
            self._changed.notify_all()
