"""Many pools and many threads at once, and the ends of pools."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import support.shm.pool_tasks as tasks
from support.shm.pool_helpers import each_method
from support.waiting import until

import tundish as td

# ---- Many at once ----


def test_several_pools_and_pools_within_tasks() -> None:
    with (
        td.shm.SharedPool(tasks.nested, max_workers=2) as outer,
        td.shm.SharedPool(tasks.squared, max_workers=1) as other,
    ):
        results = outer.map([1, 2, 3])
        assert [square for square, _ in other.map(range(50))] == [item * item for item in range(50)]
        assert list(results) == [[0, 1 * k, 2 * k, 3 * k] for k in (1, 2, 3)]


def test_many_threads_submit_and_map_at_once() -> None:
    failures: list[BaseException] = []

    def use(pool: td.shm.SharedPool, seed: int) -> None:
        try:
            for turn in range(10):
                items = list(range(seed * 1000, seed * 1000 + 50 + turn))
                futures = [pool.submit(item) for item in items]
                assert list(pool.map(items, ordered=True)) == items
                assert sorted(pool.map(items, ordered=False, chunksize=1)) == items
                assert [future.result(30) for future in futures] == items
        except BaseException as error:
            failures.append(error)

    with td.shm.SharedPool(tasks.echo, max_workers=2) as pool:
        threads = [threading.Thread(target=use, args=(pool, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_more_tasks_than_the_queue_holds_are_all_done_once() -> None:
    with td.shm.SharedPool(tasks.echo, max_workers=2) as pool:
        futures = [pool.submit(item) for item in range(5000)]
        assert [future.result(30) for future in futures] == list(range(5000))


# ---- The end ----


@each_method
def test_after_shutdown_nothing_is_taken_and_nothing_is_lost(method: str) -> None:
    pool = td.shm.SharedPool(tasks.naps, max_workers=2, mp_context=method)
    futures = [pool.submit(0.01) for _ in range(20)]
    pool.shutdown()
    assert [future.result(0) for future in futures] == [0.01] * 20
    for refused in (lambda: pool.submit(1), lambda: pool.map([1])):
        with pytest.raises(RuntimeError, match="the pool is shut down: make another one"):
            refused()
    pool.shutdown()
    pool.shutdown(wait=False, cancel=True)
    assert [future.result(0) for future in futures] == [0.01] * 20


def test_shutdown_with_cancel_cancels_tasks_that_are_not_begun(tmp_path: Path) -> None:
    pool = td.shm.SharedPool(tasks.touch_and_wait, max_workers=1)
    futures = [pool.submit((str(tmp_path / str(number)), 0.1)) for number in range(600)]
    until((tmp_path / "0").exists)
    pool.shutdown(cancel=True)
    assert futures[0].result(0) and all(future.cancelled() for future in futures[2:])


def test_shutdown_does_not_wait_for_workers_that_only_start(tmp_path: Path) -> None:
    pool = td.shm.SharedPool(tasks.pid_with, {"counted": tasks.LateElsewhere(str(tmp_path))}, 2, "spawn")
    pool.submit(1).result(30)
    until((tmp_path / "second").exists)
    began = time.monotonic()
    pool.shutdown()
    # time: a worker that takes a minute to start is not waited for
    assert time.monotonic() - began < 30


def test_many_workers_start_and_end() -> None:
    # More messages than a socket has room for. In a small program, which is cheap to fork.
    script = """
import operator, tundish as td
pool = td.shm.SharedPool(operator.neg, max_workers=400, mp_context="fork")
print(pool.submit(1).result(60))
pool.shutdown()
try:
    pool.submit(1)
except td.errors.PoolError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert (ran.stderr, ran.returncode) == ("", 0)
    result, refusal = ran.stdout.splitlines()
    assert result == "-1"
    assert "is shut down" in refusal


def test_shutdown_without_waiting_returns_at_once_and_ends_in_the_background(tmp_path: Path) -> None:
    pool = td.shm.SharedPool(tasks.touch_and_wait, max_workers=1)
    future = pool.submit((str(tmp_path / "begun"), 0))
    pool.shutdown(wait=False)
    assert not future.done()
    (tmp_path / "go").touch()
    assert future.result(60)
    pool.shutdown()


def test_an_exception_in_the_block_drops_tasks_that_are_not_begun(tmp_path: Path) -> None:
    futures: list[Any] = []

    def fail() -> None:
        with td.shm.SharedPool(tasks.touch_and_wait, max_workers=1) as pool:
            futures.extend(pool.submit((str(tmp_path / str(number)), 0.1)) for number in range(50))
            until((tmp_path / "0").exists)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert sum(future.cancelled() for future in futures) >= 48


def test_a_pool_that_is_dropped_finishes_its_tasks_and_ends() -> None:
    pids = [pid for _, pid in td.shm.SharedPool(tasks.squared, max_workers=1).map([1])]
    future = td.shm.SharedPool(tasks.echo, max_workers=1).submit("still done")
    gc.collect()
    assert future.result(20) == "still done"
    until(lambda: not _lives(pids[0]))


def test_the_end_of_the_program_finishes_submitted_tasks(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import support.shm.pool_tasks as pool_tasks, tundish as td
pool = td.shm.SharedPool(pool_tasks.touch_and_wait, max_workers=1)
futures = [pool.submit((f"{tmp_path}/{{number}}", 0.02)) for number in range(5)]
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("", "", 0)
    assert len(list(tmp_path.iterdir())) == 5


def test_a_done_callback_may_submit_and_shut_down() -> None:
    pool = td.shm.SharedPool(tasks.echo, max_workers=1)
    more: list[Any] = []

    def go_on(future: Any) -> None:
        more.append(pool.submit(future.result() + 1))
        pool.shutdown()

    pool.submit(1).add_done_callback(go_on)
    until(lambda: bool(more))
    assert more[0].result(20) == 2
    pool.shutdown()


def test_a_forked_child_cannot_use_its_parents_pool() -> None:
    with td.shm.SharedPool(tasks.naps, max_workers=1) as pool:
        future = pool.submit(0.2)
        reader, writer = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_use_in_child, args=(pool, future, writer))
        child.start()
        answers = reader.recv()
        child.join()
        child.close()
        reader.close()
        writer.close()
        assert answers[:3] == ["PoolError"] * 3 and answers[3:] == ["None", "False"]
        assert future.result(20) == 0.2
        assert pool.submit(0).result() == 0


def _use_in_child(pool: td.shm.SharedPool, future: Any, answers: Any) -> None:
    said = []
    for use in (lambda: pool.submit(1), lambda: pool.map([1]), future.result, pool.shutdown, future.cancel):
        try:
            said.append(repr(use()))
        except Exception as error:
            said.append(type(error).__name__)
    answers.send(said)


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
