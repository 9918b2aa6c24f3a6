"""Ctrl-C at every moment of what a caller does with a pool: others have their answers, and the pool ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.distributed.ctrl_c import at_every_moment

import pool_tasks as tasks
import tundish as td
from pool_helpers import until
from tundish import waiting
from tundish.shm.pool import engine, futures, life, mapping, pool
from tundish.shm.pool.futures import TaskFuture
from tundish.shm.pool.life import Life
from tundish.shm.pool.zygote import Zygote
from tundish.waiting import Moment

PLACES = (threading, concurrent.futures._base, waiting, engine, futures, mapping, pool)
# More than there are places on the board.
MANY = 600

# What makes a pool, without what runs in its processes too; where one is started SIGINT is blocked.
BEGINNINGS = (Life.__init__, Life._gather, Life._having, life._workforce, Zygote.__init__, Zygote.begin)

USES: dict[str, Callable[[td.shm.SharedPool, TaskFuture], object]] = {
    "done": lambda _, future: (future.done(), future.running(), future.cancelled(), repr(future)),
    "result": lambda _, future: future.result(30),
    "exception": lambda _, future: future.exception(30),
    "add_done_callback": lambda _, future: future.add_done_callback(lambda _: None),
    "wait": lambda _, future: concurrent.futures.wait([future], 0.001),
    "as_completed": lambda _, future: list(concurrent.futures.as_completed([future], 0.001)),
    "map": lambda pool, _: list(pool.map(range(3))),
}


def elsewhere(call: Callable[[], Any]) -> Any:
    """What `call` returns on another thread: on the main one, whoever left a lock taken might give it back."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(30)
    assert results, "it hangs, or failed"
    return results[0]


def children() -> set[int]:
    """Of all threads, with those that ended and nobody waited for: `multiprocessing` is not asked, which would."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


# Sockets that nobody has yet are closed as they are collected, which Python remarks on.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_ctrl_c_anywhere_in_the_beginning_of_a_pool_leaves_no_process() -> None:
    before = children()
    for _, ctrl_c in at_every_moment(*BEGINNINGS):
        made = []
        with ctrl_c:
            made.append(td.shm.SharedPool(tasks.echo, max_workers=1))
        for one in made:
            one.shutdown()
        made.clear()
        until(lambda: children() <= before)


@pytest.mark.parametrize("use", USES)
def test_ctrl_c_anywhere_in_a_use_of_a_pool_holds_up_nobody(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_TURN_SECONDS", 0.01)
    with td.shm.SharedPool(tasks.echo, max_workers=1) as one:
        for number, ctrl_c in at_every_moment(*PLACES):
            future = one.submit(number)
            with contextlib.suppress(TimeoutError), ctrl_c:
                USES[use](one, future)
            assert elsewhere(lambda: future.result(30)) == number  # noqa: B023 (called in this round)
            told = Moment()
            one.submit(-1).add_done_callback(lambda _: told.come())  # noqa: B023 (as above)
            assert told.wait(30), number


@pytest.mark.parametrize("ahead", [1, MANY])
def test_what_is_taken_back_is_so_though_ctrl_c_comes_anywhere(ahead: int, tmp_path: Path) -> None:
    with td.shm.SharedPool(tasks.touch_and_wait, max_workers=1) as one:
        for _ in range(ahead):
            one.submit((str(tmp_path / "begun"), 0))
        until((tmp_path / "begun").exists)
        for number, ctrl_c in at_every_moment(threading, waiting, engine, futures):
            future = one.submit((str(tmp_path / "never"), 0))
            with ctrl_c:
                future.cancel()
            assert elsewhere(future.cancel), number
            assert elsewhere(future.cancelled)
        (tmp_path / "go").touch()
    assert not (tmp_path / "never").exists()


def test_who_waits_for_what_is_taken_back_hears_of_it_once_though_ctrl_c_comes_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_TURN_SECONDS", 0.01)
    monkeypatch.setattr(engine, "_LOOK_AROUND_SECONDS", 0.02)
    with td.shm.SharedPool(tasks.touch_and_wait, max_workers=1) as one:
        one.submit((str(tmp_path / "begun"), 0))
        until((tmp_path / "begun").exists)
        for number, ctrl_c in at_every_moment(threading, waiting, engine, futures):
            future = one.submit((str(tmp_path / "never"), 0))
            told: list[TaskFuture] = []
            future.add_done_callback(told.append)
            waits = Wait(future)
            with ctrl_c:
                future.cancel()
            if not elsewhere(future.cancelled):
                # It came before anything was taken back.
                assert elsewhere(future.cancel), number
            assert waits.done() == {future}, number
            assert elsewhere(lambda: concurrent.futures.wait([future], 30).done) == {future}, number  # noqa: B023 (as above)
            # Of several that are taken back each is told after the one before.
            last = Moment()
            other = one.submit((str(tmp_path / "never"), 0))
            other.add_done_callback(lambda _: last.come())  # noqa: B023 (as above)
            assert other.cancel() and last.wait(30)
            assert told == [future], number
        (tmp_path / "go").touch()


class Wait:
    """A thread that waits for a future."""

    def __init__(self, future: TaskFuture) -> None:
        self._done: Any = None
        self._thread = threading.Thread(target=self._wait, args=(future,), daemon=True)
        self._thread.start()
        until(lambda: bool(future._waiters))

    def _wait(self, future: TaskFuture) -> None:
        self._done = concurrent.futures.wait([future], 30).done

    def done(self) -> Any:
        """What it waited for has come."""
        self._thread.join(40)
        return self._done
