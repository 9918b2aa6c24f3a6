"""Code of users that fails in unusual places, in workers and in the parent: every task gets an answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any, NoReturn

import pytest
import support.shm.pool_tasks as tasks
from support.distributed.rank_processes import send_signal
from support.shm.pool_programs import Program
from support.waiting import until

import tundish as td
from tundish.errors import NotPicklableError, PoolError


def _fail() -> NoReturn:
    raise ZeroDivisionError("its own")


class FailsToUnpickle:
    def __reduce__(self) -> Any:
        return _fail, ()


class UnloadableError(Exception):
    def __reduce__(self) -> Any:
        return _fail, ()


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        _fail()


class SilentError(Exception):
    def __str__(self) -> str:
        _fail()


class ClosedError(Exception):
    """An exception whose attributes cannot be set."""

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(name)


def misbehave(item: str) -> Any:
    if item == "unloadable value":
        return FailsToUnpickle()
    if item == "unloadable error":
        raise UnloadableError
    if item == "unpicklable error":
        raise UnpicklableError
    if item == "error without a message":
        raise SilentError
    if item == "error that is closed":
        raise ClosedError("its own")
    return item


EXPECTED: dict[str, tuple[type[BaseException], str]] = {
    "unloadable value": (NotPicklableError, "cannot be unpickled here: ZeroDivisionError"),
    "unloadable error": (NotPicklableError, "UnloadableError (ZeroDivisionError: its own)"),
    "unpicklable error": (NotPicklableError, "UnpicklableError (ZeroDivisionError: its own)"),
    "error without a message": (SilentError, ""),
    "error that is closed": (ClosedError, "its own"),
}


def test_a_result_that_cannot_be_pickled_or_unpickled_is_an_error_on_its_future() -> None:
    with td.shm.SharedPool(misbehave, max_workers=1) as pool:
        # For `as_completed`, the thread of the pool unpickles.
        futures = {pool.submit(item): item for item in EXPECTED}
        for future in as_completed(futures, timeout=20):
            kind, says = EXPECTED[futures[future]]
            error = future.exception()
            assert type(error) is kind and error.__cause__ is not None
            assert kind is SilentError or says in str(error)
        assert pool.submit("and on").result(20) == "and on"


def test_a_callback_that_raises_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    called: list[int] = []
    with td.shm.SharedPool(tasks.touch_and_wait, max_workers=1) as pool:
        first = pool.submit((os.devnull, 0.05))
        first.add_done_callback(lambda _: _fail())
        first.add_done_callback(lambda _: called.append(1))
        pool.submit((os.devnull, 0.01)).add_done_callback(lambda _: called.append(2))
        until(lambda: len(called) == 2)
    assert "ZeroDivisionError: its own" in caplog.text
    # The traceback has frames of the pool.
    caplog.clear()


def _exit(_: Future[Any]) -> NoReturn:
    raise SystemExit(3)


def test_a_callback_that_exits_breaks_the_pool_and_keeps_nobody_waiting() -> None:
    with td.shm.SharedPool(tasks.naps, max_workers=1) as pool:
        first, second = pool.submit(0.05), pool.submit(0.5)
        first.add_done_callback(_exit)
        assert next(as_completed([first], timeout=20)).result() == 0.05
        until(second.done)
        with pytest.raises(PoolError, match="the pool is broken"):
            second.result(20)
        with pytest.raises(PoolError, match="the pool is broken"):
            pool.submit(0.0)


def test_a_callback_may_wait_for_what_is_not_on_the_queue_yet() -> None:
    results: list[Any] = []
    told = threading.Event()
    with td.shm.SharedPool(tasks.naps, max_workers=2) as pool:
        futures = [pool.submit(0.3 if number == 0 else 0.0) for number in range(2000)]

        def wait(_: Future[Any]) -> None:
            results.append((threading.current_thread().name, futures[-1].result(20)))
            told.set()

        futures[0].add_done_callback(wait)
        assert told.wait(20)
        assert results == [("tundish-pool-results", 0.0)]


CHILD = """
with td.shm.SharedPool(tasks.naps, max_workers=2) as pool:
    results = pool.map([0.001] * 500, chunksize=1)
    waiting = [pool.submit(0.001) for _ in range(1500)]
    next(results)
    child = os.fork()
    if child == 0:
        for use in (lambda: list(results), lambda: pool.submit(0.0), lambda: waiting[-1].result(5)):
            try:
                use()
            except td.errors.PoolError as error:
                assert "belongs to process" in str(error), error
            else:
                os._exit(1)
        assert not waiting[-1].cancel() and not waiting[-1].running()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sum(1 for _ in results) == 499
    assert all(future.result(20) == 0.001 for future in waiting)
say("right")
"""


def test_a_child_by_fork_has_nothing_of_its_parents_pool(tmp_path: Path) -> None:
    with Program(CHILD, tmp_path) as program:
        assert program.read_line() == "right"


def leave_a_thread(_item: Any) -> int:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return os.getpid()


def pid(_item: Any) -> int:
    return os.getpid()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("way", ["stopped", "threads"])
def test_shutdown_ends_workers_that_do_not_end(method: str, way: str) -> None:
    pool = td.shm.SharedPool(leave_a_thread if way == "threads" else pid, max_workers=1, mp_context=method)
    worker = pool.submit(None).result(60)
    if way == "stopped":
        send_signal(worker, signal.SIGSTOP)
    began = time.monotonic()
    pool.shutdown(timeout=0.5)
    # time: 40 times the timeout, and the worker would stay for ever
    assert 0.4 < time.monotonic() - began < 20
    assert not Path(f"/proc/{worker}").exists()


def test_a_pool_that_cannot_have_a_thread_is_broken_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "tundish-pool-workers":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool = td.shm.SharedPool(tasks.echo, max_workers=1)
    with pytest.raises(PoolError, match="can't start new thread"):
        pool.submit(1).result(20)
    pool.shutdown()
