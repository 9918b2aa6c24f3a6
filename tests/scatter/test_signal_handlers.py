"""A signal handler ends the iteration while its loop waits for a batch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

import tundish as td
from tundish.errors import InvalidInputError


class Gated:
    """Six numbers. The fourth waits for an event."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def __iter__(self) -> Iterator[int]:
        for number in range(6):
            if number == 3:
                assert self.may_go_on.wait(60)
            yield number


@pytest.mark.parametrize("way", ["close", "set_epoch", "load_state_dict"])
def test_an_iteration_that_a_signal_handler_ends_raises(way: str) -> None:
    gated = Gated()
    with td.DispatchLoader(gated) as loader:
        batches = iter(loader)
        assert [next(batches) for _ in range(2)] == [0, 1]
        before = loader.state_dict()
        assert next(batches) == 2
        expected = {"close": loader.state_dict(), "set_epoch": None, "load_state_dict": before}[way]

        def handler(*_: object) -> None:
            call = {
                "close": loader.close,
                "set_epoch": lambda: loader.set_epoch(7),
                "load_state_dict": lambda: loader.load_state_dict(before),
            }[way]
            call()
            gated.may_go_on.set()

        replaced = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(InvalidInputError, match="no more steps"):
                next(batches)
        finally:
            signal.signal(signal.SIGALRM, replaced)
        state = loader.state_dict()
        assert state == expected if expected is not None else (state["epoch"], state["batches"]) == (7, 0)
