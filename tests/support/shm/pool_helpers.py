"""Helpers of the pool tests."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

each_method = pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    # time: what comes at all comes within this time
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)
