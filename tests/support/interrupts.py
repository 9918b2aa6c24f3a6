"""Ctrl-C at a given time, and once a thread waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.waiting import PATIENCE

# Looks at a thread, all of which have to find it asleep, and the seconds between them.
_LOOKS, _BETWEEN_LOOKS = 6, 0.01


def until_it_waits(process_id: int, thread_id: int | None = None) -> None:
    """Returns once a thread, by default the first of its process, waits for something and computes nothing.

    A test that sends a signal into a wait has no other sign that the wait has begun.
    """
    place = Path(f"/proc/{process_id}/task/{thread_id or process_id}/stat")
    until = time.monotonic() + PATIENCE
    asleep, last = 0, ""
    while asleep < _LOOKS:
        # time: what comes at all comes within this time
        assert time.monotonic() < until, (
            f"thread {thread_id or process_id} of process {process_id} does not wait"
        )
        fields = place.read_text().rpartition(")")[2].split()
        # Its state, and the processor time that it has used.
        state, used = fields[0], " ".join(fields[11:13])
        asleep = asleep + 1 if state == "S" and used == last else 0
        last = used
        time.sleep(_BETWEEN_LOOKS)


def signal_once_waiting(number: signal.Signals = signal.SIGINT) -> threading.Thread:
    """Start a thread that sends this process a signal, Ctrl-C by default, once the calling thread waits."""
    caller = threading.get_native_id()

    def send() -> None:
        until_it_waits(os.getpid(), caller)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


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
