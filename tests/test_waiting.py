"""Waits that Ctrl-C ends, also where the signal came before they began."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tundish.waiting import wait_for


def test_what_comes_in_time_is_waited_for() -> None:
    event = threading.Event()
    timer = threading.Timer(0.7, event.set)
    timer.start()
    assert wait_for(event.wait, 30)
    timer.join()
    assert wait_for(event.wait, 0)


@pytest.mark.parametrize("seconds", [0, 0.1, 0.5, 0.8])
def test_no_wait_is_shorter_than_it_was_asked_for(seconds: float) -> None:
    begun = time.monotonic()
    assert not wait_for(threading.Event().wait, seconds)
    assert time.monotonic() - begun >= seconds


def test_a_signal_that_another_thread_took_ends_the_wait() -> None:
    """As one does that the interpreter saw before the wait began: neither wakes the waiting thread."""
    pressed: list[float] = []

    def press() -> None:
        time.sleep(0.2)
        pressed.append(time.monotonic())
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        wait_for(threading.Event().wait, 30)
    assert time.monotonic() - pressed[0] < 5
    presser.join()
