"""Whoever looks whether somebody has left a pass."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from tundish.scatter import stops
from tundish.waiting import Thread


class Told:
    """In the place of the line to the store: says at once what it was given."""

    def __init__(self, *told: tuple[int, int] | None) -> None:
        self._told = list(told)

    def forget(self, key: str) -> None:
        assert key == "loader/1"

    def ask(self, key: str) -> tuple[int, int] | None:
        assert key == "loader/5"
        return self._told.pop(0) if self._told else None


def watching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "tundish-dispatch-watch"]


def wait_until_nobody_watches() -> None:
    deadline = time.monotonic() + 60
    while watching():
        assert time.monotonic() < deadline, "a thread goes on asking"
        gc.collect()
        time.sleep(0.01)


def test_what_was_told_stays_found() -> None:
    line: Any = Told(None, (2, 7), None)
    watch = stops.StopWatch(line, "loader", 5)
    deadline = time.monotonic() + 60
    while watch.found is None or line._told:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watch.found == (2, 7)
    watch.close()
    watch.close()
    wait_until_nobody_watches()


def test_who_is_interrupted_as_he_begins_to_look_leaves_nobody_looking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    line: Any = Told()
    monkeypatch.setattr(stops, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        stops.StopWatch(line, "loader", 5)
    wait_until_nobody_watches()
