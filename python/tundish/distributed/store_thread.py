"""Calls functions on a daemon thread, so that a caller can give up on one that the job's store blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tundish.daemon_thread import DaemonThread

__all__ = ["StoreThread"]


class StoreThread:
    """A thread that starts with the first call. While a call blocks it, further calls get a new thread."""

    def __init__(self) -> None:
        self._thread: DaemonThread | None = None
        self._last: Future[Any] | None = None
        self._is_closed = False

    def submit(self, function: Callable[[], Any], *, waits: bool = False) -> Future[Any]:
        """Call `function` on the thread. If the last call still runs, use a new thread, unless this one `waits`."""
        thread = self._thread
        if thread is None or not (waits or self._last is None or self._last.done()):
            # The thread before this one ends after its call.
            thread = self._thread = DaemonThread("tundish-vote")
        future = self._last = thread.submit(function)
        if self._is_closed:
            # Another thread may have called `close` meanwhile.
            thread.close()
        return future

    def close(self) -> None:
        """End the thread after its current call; never waits."""
        self._is_closed = True
        self._thread = None
