"""`DaemonThread`: calls functions that may block for long, without keeping the process from ending; `is_done` waits.

An executor of the standard library would not do: the interpreter joins its threads when it exits.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class DaemonThread:
    """A thread that makes calls in order. It starts with the first call, and ends after this object is closed or freed.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _Calls | None = None
        self._last: Future[Any] | None = None
        self._is_closed = False

    def submit(self, function: Callable[[], T], *, waits: bool = True) -> Future[T]:
        """Call `function` after all earlier calls.

        With `waits=False` a new thread is used if one of them still runs.
        """
        calls, future = self._calls, Future[T]()
        if calls is None or not (waits or self._last is None or self._last.done()):
            if calls is not None:
                calls.put(None)
            calls = self._calls = queue.SimpleQueue()
            weakref.finalize(self, calls.put, None).atexit = False
            threading.Thread(target=_run, args=(calls,), name=self._name, daemon=True).start()
        self._last = future
        calls.put((future, function))
        if self._is_closed:
            # Another thread may have called `close` before the queue was made.
            calls.put(None)
        return future

    def close(self) -> None:
        """End the thread after its calls; never waits."""
        self._is_closed = True
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)


def is_done(future: Future[Any], seconds: float) -> bool:
    """Whether `future` is done within so many seconds."""
    with contextlib.suppress(TimeoutError):
        future.exception(seconds)
    return future.done()


def _run(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            future.set_exception(error)
        # Between calls the thread keeps nothing of its callers alive.
        del call, future, function
