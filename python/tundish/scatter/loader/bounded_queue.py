"""A bounded queue between the thread that prefetches and the training loop."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["BoundedQueue"]

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """A queue of at most so many items and bytes; one item may be larger than that.

    One thread puts items and ends the queue; the other gets them and may close it.

    Attributes:
        taken: how many items were taken.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.taken = 0
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._is_ended = self._is_closed = False
        self._error: BaseException | None = None

    def is_closed(self) -> bool:
        """Whether no more items are wanted."""
        return self._is_closed

    @property
    def contents(self) -> tuple[int, int]:
        """The number of items in the queue, and their bytes."""
        return len(self._items), self._bytes

    def wait_for_room(self, seconds: float) -> bool:
        """Whether there is room within so many seconds, or the queue is closed."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or not self._items
                    or (len(self._items) < self._max_items and self._bytes < self._max_bytes)
                ),
                seconds,
            )

    def wait_until_empty(self, seconds: float) -> bool:
        """Whether all items are taken within so many seconds, or the queue is closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed or not self._items, seconds)

    def put(self, item: T, size: int) -> None:
        """Add an item of `size` bytes, whether there is room or not."""
        with self._changed:
            if not self._is_closed:
                self._items.append((item, size))
                self._bytes += size
                self._changed.notify_all()

    def end(self, error: BaseException | None = None, *, after: int | None = None) -> int:
        """Add no more items. `error` is raised once all items are taken, or `after` items in all.

        Returns how many items there are in all.
        """
        with self._changed:
            self._is_ended = True
            # An error that nobody takes would keep the frames that it was raised in.
            self._error = None if self._is_closed else error
            while after is not None and self._items and self.taken + len(self._items) > after:
                self._bytes -= self._items.pop()[1]
            self._changed.notify_all()
            return self.taken + len(self._items)

    def wait(self, seconds: float) -> bool:
        """Whether there is an item within so many seconds, or the end."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._items) or self._is_ended, seconds)

    def get(self) -> T | None:
        """The next item that is there; None at the end. Raises the error at the end, once."""
        with self._changed:
            if self._items:
                item, size = self._items.popleft()
                self._bytes -= size
                self.taken += 1
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is None:
            return None
        try:
            raise error
        finally:
            # Else the error keeps the caller's frames, and with them the batch.
            del error

    def close(self) -> None:
        """Want no more items; those in the queue are dropped."""
        with self._changed:
            self._is_closed, self._error = True, None
            self._items.clear()
            self._bytes = 0
            self._changed.notify_all()
