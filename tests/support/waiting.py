"""Limits of time that a machine of half the speed keeps under full load, and waiting for what comes."""

from __future__ import annotations

import time
from collections.abc import Callable

# time: what comes at all comes within this time
PATIENCE = 60.0
# time: ten times the promise of 1 s (20 times that of half a second), and far from the timeouts of these tests
NOTICED = 10.0


def until(condition: Callable[[], bool], what: str = "it never came", seconds: float = PATIENCE) -> None:
    """Returns once `condition` is true; fails with `what` if it is not true after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        # time: what comes at all comes within this time
        assert time.monotonic() < deadline, what
        time.sleep(0.002)
