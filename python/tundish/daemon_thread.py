"""`DaemonThread`: calls functions that may block for long, without keeping the process from ending.

An executor of the standard library would not do: the interpreter joins its threads when it exits.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["DaemonThread"]

T = TypeVar("T")

_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class DaemonThread:
    """A thread that makes calls in order. It ends after its last call once this object is closed, or is garbage.

    Attributes:
        close: a function that ends the thread after its current calls; it never waits.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self.close = weakref.finalize(self, self._calls.put, None)
        self.close.atexit = False
        threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` after all calls before it."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future


def _run(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            future.set_exception(error)
        # Between calls the thread keeps nothing of its callers alive.
        del call, future, function
