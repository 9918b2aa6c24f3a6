"""How a child process is started, so that Ctrl-C meets it prepared, and how its end is awaited.

Owns nothing. What always holds: a child begins with SIGINT blocked, and says itself from when on it ignores it; the
parent hears what came meanwhile afterwards.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

__all__ = ["end", "start_quietly"]


def start_quietly(process: BaseProcess, *, is_forked: bool) -> None:
    """Start `process` with SIGINT blocked."""
    if not is_forked:
        # Else the tracker is started on the way, which unblocks the signal.
        resource_tracker.ensure_running()
    else:
        _make_sure_of_descriptors()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            # Of a fork beside threads: the zygote touches nothing that they may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _make_sure_of_descriptors() -> None:
    """Fail here where there are none for two pipes: multiprocessing would leave the first open."""
    opened = []
    try:
        for _ in range(4):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 (closed one by one)
    finally:
        for number in opened:
            os.close(number)


def end(process: BaseProcess) -> None:
    """Wait until `process` is over, and let go of it."""
    process.join()
    while process.exitcode is None:
        # Another thread, which looked at all children, has reaped it and is about to say so.
        time.sleep(1e-3)
    process.close()
