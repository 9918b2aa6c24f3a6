"""Calls functions on a daemon thread, so that a caller can give up on one that the job's store blocks."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["StoreThread"]

_Tasks = queue.SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


def _run_tasks(tasks: _Tasks) -> None:
    # Between tasks the thread refers to no voter, so that an unused voter can be collected.
    while (task := tasks.get()) is not None:
        future, function = task
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            future.set_exception(error)
        del task, future, function


class StoreThread:
    """A thread that starts with the first call. While a call blocks it, further calls get a new thread."""

    def __init__(self) -> None:
        self._tasks: _Tasks | None = None
        self._last: Future[Any] | None = None
        self._is_closed = False

    def submit(self, function: Callable[[], Any], *, waits: bool = False) -> Future[Any]:
        """Call `function` on the thread. If the last call still runs, use a new thread, unless this one `waits`."""
        tasks, future = self._tasks, Future[Any]()
        if tasks is None or not (waits or self._last is None or self._last.done()):
            if tasks is not None:
                tasks.put(None)
            tasks = self._tasks = queue.SimpleQueue()
            weakref.finalize(self, tasks.put, None).atexit = False
            threading.Thread(target=_run_tasks, args=(tasks,), name="tundish-vote", daemon=True).start()
        self._last = future
        tasks.put((future, function))
        if self._is_closed:
            # Another thread may have called `close` meanwhile.
            tasks.put(None)
        return future

    def close(self) -> None:
        """End the thread after its current call; never waits."""
        self._is_closed = True
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            tasks.put(None)
