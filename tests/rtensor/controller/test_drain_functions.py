"""Drain functions of workers without a server."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tundish.rtensor import Worker
from tundish.rtensor.controller.drain_functions import DrainFunctions


def test_no_two_calls_of_one_worker_run_at_once_even_after_an_interrupt() -> None:
    may_end, running, most, seen = threading.Event(), [0], [0], []

    def drain(ids: list[str]) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        seen.append(ids)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            may_end.wait(60)
        running[0] -= 1

    worker = Worker("inference", "server", 0, drain)
    functions = DrainFunctions(60.0)
    with pytest.raises(KeyboardInterrupt):
        functions.call([(worker, ["a"])])
    later = threading.Timer(0.2, may_end.set)
    later.start()
    assert functions.call([(worker, ["a"]), (worker, ["b"])]) == {worker: {}}
    later.join()
    assert most == [1] and seen == [["a"], ["a", "b"]]
