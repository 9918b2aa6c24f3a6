"""Functions that drain workers which do not serve: whose calls, and how many of them at once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tundish.rtensor.hooks import Hooks
from tundish.rtensor.lines import Worker


def test_of_one_worker_no_two_run_at_once_though_who_waited_was_interrupted() -> None:
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
    hooks = Hooks(60.0)
    with pytest.raises(KeyboardInterrupt):
        hooks.call([(worker, ["a"])])
    later = threading.Timer(0.2, may_end.set)
    later.start()
    assert hooks.call([(worker, ["a"]), (worker, ["b"])]) == {worker: {}}
    later.join()
    assert most == [1] and seen == [["a"], ["a", "b"]]
