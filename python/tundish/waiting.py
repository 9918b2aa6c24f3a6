"""Waits that Ctrl-C ends.

What always holds: no wait is for long. A signal that comes between the interpreter's last look for one and the wait for
a lock does not end that wait, which for a checkpoint is minutes and for a lost rank hours; so it is begun again, and
the signal looked for, twice a second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

__all__ = ["Moment", "wait_for"]

_LONGEST_SECONDS = 0.5


def wait_for(wait: Callable[[float], bool], seconds: float | None = None) -> bool:
    """Whether `wait`, which blocks for up to as many seconds as it is given, came to its end within `seconds`.

    None waits without end. As `threading.Event.wait`, and `Condition.wait_for`, which take one.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        left = _LONGEST_SECONDS if deadline is None else min(_LONGEST_SECONDS, deadline - time.monotonic())
        if wait(max(0.0, left)):
            return True
        if left < _LONGEST_SECONDS:
            return False


class Moment:
    """Something that comes once, as a `threading.Event`, but that no wait can hold up.

    An event has a lock which Ctrl-C, if it comes right after a wait has taken it, leaves taken: whoever then says that
    the event has come waits for ever. Here that one takes nothing.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def come(self) -> None:
        """It has come."""
        self._has_come = True
        with contextlib.suppress(RuntimeError):
            self._gate.release()

    def has_come(self) -> bool:
        return self._has_come

    def wait(self, seconds: float) -> bool:
        """Whether it came within so many seconds."""
        if not self._has_come and self._gate.acquire(timeout=seconds):
            # For others who wait.
            self._gate.release()
        return self._has_come
