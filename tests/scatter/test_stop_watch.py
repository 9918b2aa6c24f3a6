"""Whoever looks whether somebody has left a pass: what is found, how soon, and what it costs the job's store."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, outcome

import tundish as td
from tundish.distributed import JobStore
from tundish.scatter import stops
from tundish.scatter.telling import tell_aside, wait_for_telling
from tundish.waiting import Thread

# Whoever leaves is known within so many seconds, on a machine that does other work too.
KNOWN = 1.0


class Told:
    """In the place of the line to the store: says at once what it was given, and that there is always news."""

    def __init__(self, *told: tuple[int, int] | None) -> None:
        self._told = list(told)
        self._news = count()

    def news(self, pause: float) -> tuple[str, float]:
        return str(next(self._news)), pause

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
    watch = stops.StopWatch(line, "loader", 5, pause=0.05, first=0.05)
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
        stops.StopWatch(line, "loader", 5, pause=0.05, first=0.05)
    wait_until_nobody_watches()


@pytest.mark.parametrize("watchers", [1, 100, 250, 1250, 10_000])
def test_all_who_watch_leave_the_store_to_its_other_work(watchers: int) -> None:
    pause = stops.pause_among(watchers)
    assert watchers / pause <= 5000.0
    assert watchers > 250 or pause == 0.05


class Asked:
    """Counts what this process asks of the store about passes, by kind."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.requests: Counter[str] = Counter()
        ask = JobStore._ask

        def counted(store: JobStore, what: str, *arguments: Any) -> Any:
            if store._namespace == "tundish-dispatch":
                self.requests[what] += 1
            return ask(store, what, *arguments)

        patch.setattr(JobStore, "_ask", counted)

    def within(self, seconds: float) -> int:
        self.requests.clear()
        time.sleep(seconds)
        return self.requests.total()


def several_loaders(rank: int, line: Line) -> None:
    with pytest.MonkeyPatch.context() as patch:
        asked = Asked(patch)
        loaders = [td.DispatchLoader(count() if rank == 0 else None) for _ in range(3)]
        passes = [iter(loader) for loader in loaders]
        for number in range(2):
            assert [next(one) for one in passes] == [2 * number + rank] * 3
        dist.barrier()
        # Behind what each asks once, as its pass begins.
        time.sleep(0.2)
        line.say(asked.within(1.0))
        dist.barrier()
        if rank == 1:
            del passes[1]
            line.say(time.monotonic())
        else:
            kind, _, whom = outcome(lambda: list(passes.pop(1)))
            assert (kind, whom) == ("PeerStoppedError", 1)
            line.say(time.monotonic())
        dist.barrier()
        # What is told of one says nothing of the others.
        assert [next(one) for one in passes] == [4 + rank] * 2
        dist.barrier()
        for loader in loaders:
            loader.close()


def test_the_loaders_of_a_process_share_one_look(tmp_path: Path) -> None:
    with Job(several_loaders, 2, tmp_path) as job:
        (source,), (receiver,) = job.hear_all()
        assert 2 <= source <= 25
        # The source tells it when somebody has left.
        assert receiver == 0
        (heard,), (left,) = job.hear_all()
        assert heard - left < KNOWN
        job.expect_end()


def in_a_large_job(rank: int, line: Line) -> None:
    """Four ranks that may ask as seldom as ten thousand: a loader for each two of them."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with pytest.MonkeyPatch.context() as patch:
        asked = Asked(patch)
        patch.setattr(stops, "_MOST_A_SECOND", 4)
        loader = td.DispatchLoader(count() if rank % 2 == 0 else None, group=groups[rank // 2])
        batches = iter(loader)
        assert next(batches) == rank % 2
        time.sleep(0.2)
        line.say(asked.within(2.0))
        dist.barrier()
        if rank == 3:
            del batches
            line.say(time.monotonic())
        elif rank == 2:
            assert outcome(lambda: list(batches))[::2] == ("PeerStoppedError", 3)
            line.say(time.monotonic())
        dist.barrier()
        loader.close()


def test_sources_of_a_large_job_look_less_often(tmp_path: Path) -> None:
    with Job(in_a_large_job, 4, tmp_path) as job:
        told = [asked for (asked,) in job.hear_all()]
        # Two of them, which may ask four times a second together.
        assert told[1] == told[3] == 0 and all(2 <= told[source] <= 6 for source in (0, 2)), told
        (heard,), (left,) = job.hear_all(2, 3)
        assert heard - left < 0.5 + KNOWN
        job.expect_end()


def behind_the_end(rank: int, line: Line) -> None:
    with pytest.MonkeyPatch.context() as patch:
        asked = Asked(patch)
        patch.setattr(stops, "_MOST_A_SECOND", 6)
        with td.DispatchLoader(range(9) if rank == 0 else None, prefetch=4) as loader:
            batches = iter(loader)
            assert next(batches) == rank
            if rank == 0:
                # Then the others know that it is the end.
                assert list(batches) == [3, 6]
            time.sleep(1.0)
            line.say(asked.within(2.0))
            dist.barrier()
            assert rank == 0 or list(batches) == [3 + rank, 6 + rank]
            dist.barrier()


def test_who_is_behind_the_end_of_the_data_looks_less_often_in_a_large_job(tmp_path: Path) -> None:
    with Job(behind_the_end, 3, tmp_path) as job:
        told = [asked for (asked,) in job.hear_all()]
        # Three of them, which may ask six times a second together, of whom one has no more to look for.
        assert told[0] == 0 and all(2 <= asked <= 6 for asked in told[1:]), told
        job.expect_end()


def test_an_end_waits_for_all_who_are_in_the_store_together() -> None:
    answers = threading.Event()
    for _ in range(8):
        tell_aside(answers.wait, "tundish-dispatch-stop")
    try:
        started = time.monotonic()
        wait_for_telling(0.2)
        assert 0.2 <= time.monotonic() - started < 0.8
    finally:
        answers.set()
    wait_for_telling(KNOWN)
