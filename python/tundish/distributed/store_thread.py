"""Calls functions on a daemon thread, so that a caller can stop waiting for one that the job's store holds up."""

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
    # Between tasks the thread refers to no voter, so that one that nobody uses any more is collected.
    while (task := tasks.get()) is not None:
        future, function = task
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            future.set_exception(error)
        del task, future, function


class StoreThread:
    """A thread that starts with the first call, and is left behind while a call holds it up."""

    def __init__(self) -> None:
        self._tasks: _Tasks | None = None
        self._last: Future[Any] | None = None
        self._is_closed = False

    def submit(self, function: Callable[[], Any], *, waits: bool = False) -> Future[Any]:
        """Have the thread call `function`; a new thread if the last one is busy, unless this call `waits` for it."""
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
            # It may have been closed just now, and its thread may have ended.
            tasks.put(None)
        return future

    def close(self) -> None:
        """End the thread after its current call; never waits."""
        self._is_closed = True
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            tasks.put(None)
