"""Ctrl-C at a given time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

__all__ = ["wait_after_interrupt"]


def wait_after_interrupt(delay: float, call: Callable[[], object]) -> float:
    """Seconds from a Ctrl-C, sent `delay` seconds from now, to the end of the call that it meets."""
    sent = 0.0

    def interrupt() -> None:
        nonlocal sent
        sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(delay, interrupt)

    def interrupted() -> None:
        # Started in here: on a busy machine the interrupt may come before this thread goes on.
        timer.start()
        call()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    waited = time.monotonic() - sent
    timer.join()
    return waited
