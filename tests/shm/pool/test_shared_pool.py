"""`SharedPool` without failures, for every start method."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support.shm.pool_tasks as tasks
from support.shm.pool_helpers import each_method
from support.waiting import until

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, NotPicklableError, PoolError
from tundish.shm import dispatcher

# ---- Binding ----


@each_method
def test_arrays_are_placed_once_and_read_only_and_all_else_is_as_it_was(method: str, tmp_path: Path) -> None:
    structured = np.zeros(3, [("a", "i4"), ("b", "f8", (2,))])
    structured["b"] = 0.5
    arrays = {
        "plain": np.arange(1 << 18, dtype=np.float64),
        "fortran": np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
        "scalar": np.array(7, np.uint8),
        "empty": np.empty((0, 3), np.float32),
        "structured": structured,
        "big_endian": np.arange(5, dtype=">i4"),
    }
    shared = arrays | {"words": ["a", "b"], "objects": None}
    expected = {
        name: (
            array.dtype,
            array.shape,
            (array.flags.c_contiguous, array.flags.f_contiguous),
            array.tobytes(),
        )
        for name, array in arrays.items()
    }
    with td.shm.SharedPool(tasks.describe, shared, 2, method) as pool:
        # No worker sees what is written after the pool was made.
        for array in arrays.values():
            array[...] = np.zeros((), array.dtype)
        seen = list(pool.map([None] * 20, chunksize=1))
    for one in seen:
        assert one["words"] == ["a", "b"] and one["objects"] is None
        for name, facts in expected.items():
            assert one[name][:4] == facts, name
            assert "read-only" in one[name][4] or name == "empty", name
    assert os.getpid() not in {one["pid"] for one in seen}


@each_method
def test_other_values_than_arrays_are_pickled_once_a_worker(method: str, tmp_path: Path) -> None:
    with td.shm.SharedPool(tasks.pid_with, {"counted": tasks.Counted(str(tmp_path))}, 2, method) as pool:
        pids = set(pool.map(range(40), chunksize=1))
        until(lambda: method == "fork" or len(list(tmp_path.iterdir())) == 2)
    unpickled = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    # Under fork nothing is pickled at all.
    assert len(unpickled) == (0 if method == "fork" else 2)
    assert len(set(unpickled)) == len(unpickled)
    assert method == "fork" or {str(pid) for pid in pids} <= set(unpickled)


def test_under_fork_a_function_need_not_be_importable_and_sees_the_moment_of_binding() -> None:
    here = {"value": 1}
    with td.shm.SharedPool(lambda item: item + here["value"], max_workers=1) as pool:
        here["value"] = 100
        assert list(pool.map([1, 2])) == [2, 3]
        # The replacing worker is the same.
        with pytest.raises(td.errors.WorkerDiedError):
            pool.submit(_Killer()).result(20)
        assert pool.submit(5).result(20) == 6


@pytest.mark.parametrize(
    "function",
    [
        lambda item, a, b: (item, a, b),
        lambda item, b, a: (item, a, b),
        lambda item, a, *, b: (item, a, b),
        lambda item, between=0, a=1, b=2: (item, a, b),
        lambda item, a, b, *rest, **more: (item, a, b),
        lambda item, **shared: (item, shared["a"], shared["b"]),
        lambda *items, **shared: (*items, shared["a"], shared["b"]),
        functools.partial(lambda first, item, a, b: (item, a, b), None),
        functools.wraps(lambda item, a, b: None)(lambda item, **shared: (item, *shared.values())),
        tasks.Called(),
        tasks.Called().method,
    ],
)
def test_shared_arguments_are_passed_by_name(function: Callable[..., Any]) -> None:
    with td.shm.SharedPool(function, {"a": "A", "b": "B"}, 1) as pool:
        assert pool.submit(5).result(20) == (5, "A", "B")


class _Killer:
    def __add__(self, other: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_tensor_is_shared_and_a_workers_writes_stay_in_that_worker() -> None:
    import torch

    tensor = torch.arange(10, dtype=torch.bfloat16)

    def write(item: int, tensor: torch.Tensor) -> float:
        tensor[0] = item
        return float(tensor.sum())

    with td.shm.SharedPool(write, {"tensor": tensor}, 1) as pool:
        assert list(pool.map([5, 7])) == [50, 52]
    assert tensor[0] == 0


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_values_that_cannot_be_sent_are_refused_when_the_pool_is_made(method: str) -> None:
    with pytest.raises(NotPicklableError, match=r"the function .* top level of a module"):
        td.shm.SharedPool(lambda item: item, mp_context=method)
    with pytest.raises(NotPicklableError, match=r"shared\['lock'\]"):
        td.shm.SharedPool(tasks.describe, {"lock": threading.Lock()}, mp_context=method)


# ---- Tasks ----


@each_method
def test_results_come_in_order_or_as_they_come_from_several_workers(method: str) -> None:
    with td.shm.SharedPool(
        tasks.squared, max_workers=2, mp_context=multiprocessing.get_context(method)
    ) as pool:
        for chunksize in (1, 7, "auto"):
            results = list(pool.map(range(3000), chunksize=chunksize))
            assert [result for result, _ in results] == [item * item for item in range(3000)]
            unordered = list(pool.map(iter(range(3000)), ordered=False, chunksize=chunksize))
            assert sorted(result for result, _ in unordered) == sorted(item * item for item in range(3000))
        until(lambda: len({pid for _, pid in pool.map(range(200), chunksize=1)}) == 2)
        assert list(pool.map([])) == []
        future = pool.submit(12)
        assert isinstance(future, concurrent.futures.Future)
        assert future.result()[0] == 144 and future.done() and future.exception() is None


def test_items_and_results_are_any_picklable_values() -> None:
    values = [None, True, 3.5, 1 << 80, "x" * 50_000, b"y" * 200_000, [1, {"a": (2,)}], {1, 2}, 1 + 2j, ...]
    # Values that differ a little from plain ones.
    values += ["\ud800", b"", signal.SIGINT, np.float64(2), -(1 << 63), 1 << 63, "zwölf"]
    with td.shm.SharedPool(tasks.echo, max_workers=2) as pool:
        for chunksize in (1, 3, "auto"):
            results = list(pool.map(values, chunksize=chunksize))
            assert results == values and list(map(type, results)) == list(map(type, values))
        results = [pool.submit(value).result() for value in values]
        assert results == values and list(map(type, results)) == list(map(type, values))


def test_futures_work_with_all_of_concurrent_futures(tmp_path: Path) -> None:
    with td.shm.SharedPool(tasks.naps, max_workers=2) as pool:
        futures = [pool.submit(seconds) for seconds in (0.05, 0.0, 0.02, 0.0)]
        told: list[Any] = []
        for future in futures:
            future.add_done_callback(
                lambda future: told.append((future.result(), threading.current_thread().name))
            )
        done = list(concurrent.futures.as_completed(futures, timeout=20))
        assert sorted(map(id, done)) == sorted(map(id, futures))
        assert concurrent.futures.wait(futures, timeout=20).not_done == set()
        until(lambda: len(told) == 4)
        assert {thread for _, thread in told} == {"tundish-pool-results"}
        late: list[Any] = []
        futures[0].add_done_callback(late.append)
        assert late == [futures[0]]
        slow = pool.submit(0.3)
        with pytest.raises(TimeoutError):
            slow.result(0.01)
        until(slow.running)
        assert not slow.done() and not slow.cancel()
        assert concurrent.futures.wait([slow], timeout=0.01).not_done == {slow}
        # It has no callback, and no caller waits.
        assert concurrent.futures.wait([slow], timeout=5).done == {slow}
        assert slow.result() == 0.3 and not slow.running()
        assert "returned float" in repr(slow)


def test_a_future_has_all_that_the_standard_library_looks_for(tmp_path: Path) -> None:
    with td.shm.SharedPool(tasks.echo, max_workers=1) as pool:
        future = pool.submit(5)
        # The pool makes them at their first use.
        for name, value in vars(concurrent.futures.Future()).items():
            mine = getattr(future, name)
            assert isinstance(mine, type(value)) or name in ("_condition", "_state", "_result"), name
        assert future.result() == 5
        # Several threads wait for the results of one thread's tasks.
        futures = [pool.submit(item) for item in range(3000)]
        told: list[Any] = []
        for future in futures[::2]:
            future.add_done_callback(lambda future: told.append(future.result()))
        threads = [
            threading.Thread(target=lambda: [future.result(20) for future in futures]) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert sorted(future.result() for future in concurrent.futures.as_completed(futures, 20)) == list(
            range(3000)
        )
        for thread in threads:
            thread.join()
        until(lambda: sorted(told) == list(range(0, 3000, 2)))


@each_method
def test_a_task_can_be_cancelled_until_a_worker_takes_it(method: str, tmp_path: Path) -> None:
    names = ["first", *map(str, range(700))]
    with td.shm.SharedPool(tasks.touch_and_wait, max_workers=1, mp_context=method) as pool:
        # More tasks than the queue has room for, so some are in the backlog.
        futures = [pool.submit((str(tmp_path / name), 0)) for name in names]
        until((tmp_path / "first").exists)
        told: list[Any] = []
        for future in futures[1:]:
            future.add_done_callback(told.append)
        assert futures[0].cancel() is False
        assert all(future.cancel() for future in futures[1:])
        assert all(future.cancel() and future.cancelled() for future in futures[1:])
        until(lambda: len(told) == 700)
        assert concurrent.futures.wait(futures[1:], timeout=5).not_done == set()
        with pytest.raises(concurrent.futures.CancelledError):
            futures[1].result()
        (tmp_path / "go").touch()
        assert futures[0].result(20)
        pool.submit((str(tmp_path / "last"), 0)).result(20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "go", "last"]


@pytest.mark.parametrize("item", [1, [1]])
def test_the_traceback_of_a_task_shows_the_users_function(item: Any) -> None:
    with td.shm.SharedPool(lambda item, a: 1 // (a - a), {"a": 1}, 1) as pool:
        error = pool.submit(item).exception(20)
    assert isinstance(error, ZeroDivisionError)
    assert "test_shared_pool.py" in str(error.__cause__)


@each_method
def test_every_failure_of_a_task_is_an_error_on_its_future(method: str) -> None:
    with td.shm.SharedPool(tasks.misbehave, max_workers=1, mp_context=method) as pool:
        with pytest.raises(LookupError, match="asked for") as raised:
            pool.submit("raise").result()
        assert "misbehave" in str(raised.value.__cause__) and "pool_tasks.py" in str(raised.value.__cause__)
        for item, kind, text in [
            ("odd error", NotPicklableError, "OddError: one and two"),
            ("local error", NotPicklableError, "LocalError: cannot travel"),
            ("lambda", NotPicklableError, "function"),
            ("unloadable", NotPicklableError, "never to be unpickled"),
            ("exit", SystemExit, "3"),
            ("long error", ValueError, "x" * 100_000),
        ]:
            with pytest.raises(kind, match=text):
                pool.submit(item).result()
            for chunksize in (1, 3):
                results = pool.map(["a", "b", item, "c"], chunksize=chunksize)
                if item != "unloadable" or chunksize == 1:
                    # A chunk is unpickled as a whole.
                    assert [next(results), next(results)] == ["a", "b"]
                with pytest.raises(kind, match=text):
                    next(results)
                with pytest.raises(StopIteration):
                    next(results)
        with pytest.raises(NotPicklableError, match="cannot be sent"):
            pool.submit(lambda: None)
        for chunksize in (1, 3):
            results = pool.map(["a", "b", threading.Lock(), "c"], chunksize=chunksize)
            assert [next(results), next(results)] == ["a", "b"]
            with pytest.raises(NotPicklableError, match="lock"):
                next(results)
        assert pool.submit("fine").result() == "fine"


# ---- Large arrays ----


@each_method
def test_large_arrays_travel_through_shared_memory_and_outlive_the_pool(method: str) -> None:
    with td.shm.SharedPool(tasks.large, max_workers=2, mp_context=method) as pool:
        kept = [pool.submit((value, 100_000)).result() for value in range(20)]
        mapped = list(pool.map([(value, 50_000) for value in range(30)]))
        shapes = [pool.submit((1, count)).result().shape for count in (0, 1, 8191, 8192, 8193)]
    for value, array in enumerate(kept):
        assert array.shape == (100_000,) and (array == value).all()
        array[:] = -1
    assert all((array == value).all() and len(array) == 50_000 for value, array in enumerate(mapped))
    assert shapes == [(0,), (1,), (8191,), (8192,), (8193,)]
    assert not any(np.shares_memory(one, other) for one, other in itertools.pairwise(kept))


def test_memory_of_results_is_used_again() -> None:
    with td.shm.SharedPool(tasks.large, max_workers=1) as pool:
        places = {pool.submit((value, 1 << 18)).result().ctypes.data for value in range(50)}
        assert len(places) <= 4


@each_method
def test_large_items_arrive_whole_and_are_the_workers_own(method: str) -> None:
    with td.shm.SharedPool(tasks.total, max_workers=2, mp_context=method) as pool:
        items = [np.full(20_000, value) for value in range(40)]
        items[3] = np.asfortranarray(np.ones((300, 300)))
        expected = [[int(item.sum())] for item in items]
        for chunksize in (1, 4, "auto"):
            results = list(pool.map(items, chunksize=chunksize))
            assert [sums for sums, _ in results] == expected
            assert all(writable == [True] for _, writable in results)
        assert pool.submit([items[1], items[2]]).result() == ([20_000, 40_000], [True, True])


# ---- Other uses ----


@each_method
def test_workers_ignore_ctrl_c(method: str) -> None:
    with td.shm.SharedPool(tasks.interrupt_handler, max_workers=1, mp_context=method) as pool:
        assert pool.submit(None).result() == (signal.SIG_IGN, set())


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"fn": 3}, InvalidTypeError, "fn is an int: give a function"),
        ({"fn": tasks.echo, "shared": [1]}, InvalidTypeError, "shared is a list: give a dict"),
        ({"fn": tasks.echo, "shared": {1: 2}}, InvalidTypeError, "cannot be called as"),
        ({"fn": tasks.echo, "shared": {"wrong": 2}}, InvalidTypeError, "unexpected keyword argument 'wrong'"),
        ({"fn": tasks.item_of}, InvalidTypeError, "missing a required argument: 'numbers'"),
        ({"fn": tasks.echo, "max_workers": 0}, InvalidInputError, "max_workers is 0"),
        ({"fn": tasks.echo, "max_workers": 10**5}, InvalidInputError, "at most"),
        ({"fn": tasks.echo, "max_workers": 1.5}, InvalidTypeError, "max_workers is 1.5"),
        ({"fn": tasks.echo, "mp_context": "threads"}, InvalidInputError, "mp_context is 'threads'"),
        ({"fn": tasks.echo, "mp_context": multiprocessing}, InvalidInputError, "mp_context is <module"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        td.shm.SharedPool(**arguments)


def test_arguments_of_calls_that_cannot_be_used_are_refused() -> None:
    with td.shm.SharedPool(tasks.echo, max_workers=1) as pool:
        with pytest.raises(InvalidTypeError, match="cannot be iterated"):
            pool.map(3)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="chunksize is 0"):
            pool.map([], chunksize=0)
        with pytest.raises(InvalidTypeError, match="chunksize is 'many'"):
            pool.map([], chunksize="many")  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="timeout is -1"):
            pool.shutdown(timeout=-1)
        with pytest.raises(InvalidTypeError, match="timeout is 'soon'"):
            pool.shutdown(timeout="soon")  # type: ignore[arg-type]
        assert pool.submit(1).result() == 1


def test_a_daemon_of_multiprocessing_cannot_make_a_pool() -> None:
    reader, writer = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_make_in_daemon, args=(writer,), daemon=True)
    child.start()
    assert "daemon" in reader.recv()
    child.join()
    child.close()
    reader.close()
    writer.close()


def _make_in_daemon(answers: Any) -> None:
    try:
        td.shm.SharedPool(tasks.echo)
    except PoolError as error:
        answers.send(str(error))


def test_pools_come_without_torch() -> None:
    script = """
import sys
import tundish as td
with td.shm.SharedPool(abs, max_workers=1) as pool:
    assert list(pool.map([-1])) == [1]
print("torch" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("False\n", "", 0)


def test_a_caller_does_not_sleep_through_an_answer_that_the_background_thread_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "_MAX_SLEEP_SECONDS", 60.0)
    with td.shm.SharedPool(tasks.echo, max_workers=2) as pool:
        longest = 0.0
        for item in range(4000):
            began = time.perf_counter()
            assert pool.submit(item).result(100) == item
            longest = max(longest, time.perf_counter() - began)
    # time: a missed wake-up would cost a minute
    assert longest < 30
