"""What a rank tells the others through the job's store while it goes on.

Owns the threads that are in the store. What always holds: no caller waits for it; threads that nobody needs do, and one
that it does not answer is left behind.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable

from tundish.waiting import Thread

__all__ = ["is_telling", "tell_aside", "wait_for_telling"]

_telling: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def tell_aside(tell: Callable[[], object], name: str) -> None:
    """Call `tell` on a thread of this name, which may fail."""

    def run() -> None:
        # Where the store is gone the job ends, and the others notice it otherwise.
        with contextlib.suppress(Exception):
            tell()

    # An interpreter that ends starts no threads any more; the others see it end.
    with contextlib.suppress(RuntimeError):
        thread = Thread(run, name)
        thread.start()
        is_telling(thread)


def is_telling(thread: threading.Thread) -> None:
    """Take note of a thread that is in the store, or may be."""
    _telling.add(thread)


def wait_for_telling(seconds: float) -> None:
    """Wait up to so many seconds until nobody is in the store: a thread that is when the interpreter ends aborts it."""
    until = time.monotonic() + seconds
    for thread in list(_telling):
        thread.join(max(0.0, until - time.monotonic()))
