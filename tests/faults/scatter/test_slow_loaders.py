"""The source leaves the loop while its loader is slow: the others hear of it once the loader has read on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.distributed.rank_processes import Job, Line, on_nodes, outcome
from support.interrupts import signal_once_waiting
from support.waiting import PATIENCE

import tundish as td

# The promise is a tenth of a second; a busy machine takes longer.


class Slow:
    """Ten batches. The fifth waits for an event."""

    def __init__(self) -> None:
        self.is_reading = threading.Event()
        self.may_go_on = threading.Event()

    def __iter__(self) -> Iterator[int]:
        for number in range(10):
            if number == 4:
                self.is_reading.set()
                assert self.may_go_on.wait(PATIENCE)
            yield number


def leaving_a_slow_loader(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    slow = Slow()
    with td.DispatchLoader(slow if rank == 0 else None) as loader:
        for how in ("break", "Ctrl-C"):
            batches = iter(loader)
            assert [next(batches), next(batches)] == [rank, 2 + rank]
            if rank == 1:
                line.say(*outcome(lambda: next(batches)), time.monotonic())  # noqa: B023
                continue
            assert slow.is_reading.wait(PATIENCE)
            left = time.monotonic()
            if how == "break":
                del batches
            else:
                signal_once_waiting()
                assert outcome(lambda: next(batches))[0] == "KeyboardInterrupt"  # noqa: B023
            line.say(left)
            # The others hear of it once the loader has read on.
            slow.may_go_on.set()
            assert loader._steps is not None and loader._steps.join(PATIENCE)
            slow.is_reading.clear()
            slow.may_go_on.clear()
        if rank == 0:
            slow.may_go_on.set()
        assert list(loader) == list(range(rank, 10, 2))


@pytest.mark.parametrize("node", [2, 1])
def test_a_source_that_leaves_while_it_reads_is_named_by_all(node: int, tmp_path: Path) -> None:
    with Job(leaving_a_slow_loader, 2, tmp_path, seconds=5.0) as job:
        job.tell_all(node)
        for _ in range(2):
            kind, text, leaver, at = job.hear(1)
            assert (kind, leaver) == ("PeerLeftLoopError", 0), text
            (left,) = job.hear(0)
            # time: far from the 5 s of the timeout
            assert at - left < 4
        job.expect_end()
