"""Workers, parents and whole groups of a pool die at any time: nothing hangs, is lost or is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support.shm.pool_tasks as tasks
from support.interrupts import until_it_waits
from support.shm.pool_helpers import each_method
from support.shm.pool_programs import Program
from support.soak import IS_SOAK
from support.waiting import until

import tundish as td
from tundish.errors import PoolError, WorkerDiedError

KILLS = 200 if IS_SOAK else 10

DEATHS = {
    "kill": "SIGKILL",
    "exit": "exit code 7",
    "segfault": "SIGSEGV",
    "mid-result": "SIGKILL",
    "mid-large-result": "SIGKILL",
}


# ---- Deaths of workers ----


@each_method
def test_a_dead_worker_fails_its_own_task_by_name_and_is_replaced(method: str) -> None:
    with td.shm.SharedPool(tasks.die, max_workers=2, mp_context=method) as pool:
        before = pool.submit("pid").result(30)
        number = 1
        for how, said in DEATHS.items():
            fine = [pool.submit(item) for item in range(20)]
            bad = pool.submit(how)
            more = [pool.submit(item) for item in range(20)]
            with pytest.raises(WorkerDiedError, match=f"task {number + 20} .*{said}") as raised:
                bad.result(30)
            assert f"process {raised.value.pid}" in str(raised.value) and raised.value.pid != os.getpid()
            assert isinstance(bad.exception(), RuntimeError)
            assert [future.result(30) for future in fine + more] == [*range(20), *range(20)]
            number += 41
        assert pool.submit("pid").result(30) != os.getpid()
        assert before != os.getpid()


@pytest.mark.parametrize("chunksize", [1, 4])
def test_a_death_within_a_map_is_raised_where_its_result_would_be(chunksize: int) -> None:
    with td.shm.SharedPool(tasks.die, max_workers=2) as pool:
        items = [*range(12), "kill", *range(12)]
        results = pool.map(items, chunksize=chunksize)
        assert [next(results) for _ in range(12)] == list(range(12))
        which = "item 12" if chunksize == 1 else "items 12 to 15"
        with pytest.raises(WorkerDiedError, match=f"{which} .*SIGKILL"):
            next(results)
        assert list(pool.map(range(30))) == list(range(30))


def test_a_task_that_kills_its_worker_is_not_tried_again(tmp_path: Path) -> None:
    def leave_a_trace(item: int) -> None:
        (tmp_path / f"{item}-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    with td.shm.SharedPool(leave_a_trace, max_workers=2) as pool:
        for future in [pool.submit(item) for item in range(6)]:
            with pytest.raises(WorkerDiedError):
                future.result(30)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == list("012345")


def test_the_error_survives_a_pickle() -> None:
    import pickle

    with td.shm.SharedPool(tasks.die, max_workers=1) as pool:
        error = pool.submit("exit").exception(20)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, WorkerDiedError) and isinstance(error, WorkerDiedError)
    assert (str(again), again.pid, again.status) == (str(error), error.pid, 7)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_large_results_outlive_the_worker_that_finished_them(method: str) -> None:
    def check(draw: random.Random, pool: td.shm.SharedPool) -> tuple[int, int]:
        futures = [pool.submit((value, 1 << 17)) for value in range(8)]
        time.sleep(draw.uniform(0, 0.004))
        for pid in pids_of(pool):
            kill(pid)
        done = lost = 0
        for value, future in enumerate(futures):
            try:
                array = future.result(30)
            except WorkerDiedError:
                lost += 1
            else:
                assert array.shape == (1 << 17,) and (array == value).all()
                done += 1
        return done, lost

    draw = random.Random(7)
    with td.shm.SharedPool(tasks.large, max_workers=2, mp_context=method) as pool:
        outcomes = [check(draw, pool) for _ in range(4 if method == "spawn" else 25)]
    assert all(lost <= 2 for _, lost in outcomes)
    assert sum(done for done, _ in outcomes) > 0


def test_a_finished_result_is_there_though_its_worker_died_before_it_was_collected() -> None:
    def large_then_dead(item: int) -> np.ndarray[Any, Any]:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return np.full(1 << 18, item)

    with td.shm.SharedPool(large_then_dead, max_workers=1) as pool:
        future = pool.submit(9)
        until(lambda: bool(pids_of(pool)))
        (pid,) = pids_of(pool)
        # The threads that would collect it wait for this lock.
        with pool._dispatcher._lock:
            until(lambda: not lives(pid))
        assert (future.result(20) == 9).all()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_under_random_kills_every_task_is_answered_once(method: str, tmp_path: Path) -> None:
    """Workers are killed at random times while futures and maps run; all results are right and whole."""
    kills = KILLS if method == "fork" else KILLS // 5
    draw = random.Random(20261122)
    over = threading.Event()
    killed = 0

    def kill_now_and_then(pool: td.shm.SharedPool) -> None:
        nonlocal killed
        # On a busy machine, all of a few kills may come between two tasks.
        while (killed < kills or lost == 0) and not over.is_set():
            time.sleep(draw.uniform(0, 0.03))
            at_work = {int(path.name.partition("-")[2]) for path in tmp_path.iterdir()}
            # Mostly ready workers: the others take long to start, and would never become ready.
            pids = [pid for pid in pids_of(pool) if pid in at_work or draw.random() < 0.02]
            if pids:
                kill(draw.choice(pids))
                killed += 1
        over.set()

    answered = lost = 0
    with td.shm.SharedPool(traced, {"folder": str(tmp_path)}, max_workers=3, mp_context=method) as pool:
        killer = threading.Thread(target=kill_now_and_then, args=(pool,))
        killer.start()
        turn = 0
        try:
            while not over.is_set():
                base, turn = turn * 100, turn + 1
                futures = [
                    pool.submit((base + number, 20_000 if number % 10 == 0 else 1)) for number in range(100)
                ]
                for number, future in enumerate(futures, base):
                    try:
                        array = future.result(30)
                    except WorkerDiedError:
                        assert f"task {number} " in str(future.exception())
                        lost += 1
                    else:
                        assert (array == number).all()
                        answered += 1
        finally:
            over.set()
            killer.join()
    assert answered + lost == turn * 100
    assert 0 < lost <= killed + 1 and answered > lost
    # No task ran twice.
    runs = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert len(runs) == len(set(runs))


def traced(item: tuple[int, int], folder: str) -> np.ndarray[Any, Any]:
    number, count = item
    (Path(folder) / f"{number}-{os.getpid()}").touch()
    return np.full(count, number)


def pids_of(pool: td.shm.SharedPool) -> list[int]:
    """Return the processes of the only pool."""
    children = {child.name: child.pid for child in multiprocessing.active_children()}
    workers = [pid for name, pid in children.items() if name.startswith("tundish-worker") and pid is not None]
    server = children.get("tundish-fork-server")
    if server is not None:
        with contextlib.suppress(OSError):
            workers += map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
    return workers


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# ---- Workers that do not start ----


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_main_module_without_a_guard_is_an_error_and_no_hang(method: str, tmp_path: Path) -> None:
    script = f"""
pool = td.shm.SharedPool(tasks.echo, max_workers=2, mp_context={method!r})
try:
    pool.submit(1).result(60)
except td.errors.PoolError as error:
    say(error)
pool.shutdown()
"""
    began = time.monotonic()
    with Program(script, tmp_path) as program:
        said = program.read_line()
        assert "workers do not start" in said and '`if __name__ == "__main__":`' in said
        _, errors = program.process.communicate(timeout=30)
        assert errors.count("Traceback") <= 6
        program.expect_nobody(1)
    # time: three starts of Python, and not one after the other without end
    assert time.monotonic() - began < 90


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_cannot_load_the_function_say_why(method: str, tmp_path: Path) -> None:
    script = f"""
def here(item):
    return item
if __name__ == "__main__":
    here.__module__, tasks.here = "support.shm.pool_tasks", here
    with td.shm.SharedPool(here, max_workers=2, mp_context={method!r}) as pool:
        say(pool.submit(1).exception(60))
"""
    with Program(script, tmp_path) as program:
        said = program.read_line()
        assert "workers do not start" in said and "Can't get attribute 'here'" in said
        assert (
            "the function is not found by workers that are not forked" in said and 'mp_context="fork"' in said
        )
        program.expect_nobody(10)


def test_a_pool_whose_fork_server_is_killed_says_so_and_ends() -> None:
    with td.shm.SharedPool(tasks.die, max_workers=2) as pool:
        pid = pool.submit("pid").result(20)
        asleep = pool.submit("sleep")
        kill(parent_of(pid))
        with pytest.raises(PoolError, match="the process that forks workers has ended"):
            asleep.result(20)
        with pytest.raises(PoolError, match="broken"):
            pool.submit(1)
    until(lambda: not lives(pid))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---- Ends ----


@each_method
def test_shutdown_ends_stuck_workers_by_force(method: str) -> None:
    pool = td.shm.SharedPool(tasks.die, max_workers=1, mp_context=method)
    assert pool.submit(1).result(30) == 1
    stuck, behind = pool.submit("sleep"), pool.submit(2)
    until(stuck.running)
    began = time.monotonic()
    pool.shutdown(timeout=0.3)
    # time: 60 times the timeout; the stuck task takes a minute
    assert 0.25 < time.monotonic() - began < 20
    with pytest.raises(WorkerDiedError, match=r"task 1 .*the pool was ended while worker process"):
        stuck.result(0)
    with pytest.raises(PoolError, match=r"task 2 .*shut down before this task started"):
        behind.result(0)


BUSY = """
if __name__ == "__main__":
    method = {method!r}
    with td.shm.SharedPool(tasks.die, {{}}, 3, method) as pool:
        # A worker that is killed during its imports ends after them, on a busy machine later than the others.
        pids = set()
        while len(pids) < 3:
            pids.update(pool.map(["pid"] * 50, chunksize=1))
        say("pids", *pids)
        large = td.shm.SharedPool(tasks.large, {{}}, 2, method)
        kept = [large.submit((1, 1 << 17)).result() for _ in range(3)]
        sleepers = [pool.submit("sleep") for _ in range(600)]
        while not sleepers[0].running():
            time.sleep(0.001)
        say("busy")
        {then}
"""


@each_method
def test_the_death_of_the_parent_ends_every_worker_within_a_second(method: str, tmp_path: Path) -> None:
    with Program(BUSY.format(method=method, then="time.sleep(600)"), tmp_path) as program:
        program.read_line()
        assert program.read_line() == "busy"
        assert len(program.members()) >= 4
        os.kill(program.process.pid, signal.SIGKILL)
        program.expect_nobody(1)
        assert program.process.stderr is not None and program.process.stderr.read() == ""


@each_method
def test_all_killed_at_once_leave_nothing(method: str, tmp_path: Path) -> None:
    with Program(BUSY.format(method=method, then="time.sleep(600)"), tmp_path) as program:
        program.read_line()
        assert program.read_line() == "busy"
        os.killpg(program.group, signal.SIGKILL)
        program.expect_nobody(1)
    assert [name for name in os.listdir("/dev/shm") if f"-{program.group}-" in name] == []


WAITS = {
    "result": "sleepers[0].result()",
    "map": "list(pool.map(['sleep'] * 100))",
    "shutdown": "pool.shutdown(timeout=None)",
    # A signal that comes just before a long sleep does not end it.
    "nothing": "while True: time.sleep(0.05)",
}


@pytest.mark.parametrize(
    ("method", "wait"), [*(("fork", wait) for wait in WAITS), ("forkserver", "result"), ("spawn", "map")]
)
def test_ctrl_c_ends_everything_with_one_traceback(method: str, wait: str, tmp_path: Path) -> None:
    with Program(BUSY.format(method=method, then=WAITS[wait]), tmp_path) as program:
        program.read_line()
        assert program.read_line() == "busy"
        until_it_waits(program.process.pid)
        os.killpg(program.group, signal.SIGINT)
        began = time.monotonic()
        # time: 40 times the promise of half a second; the tasks sleep for a minute
        out, errors = program.process.communicate(timeout=20)
        # time: as above
        assert time.monotonic() - began < 20
        assert out == ""
        assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
        assert program.process.returncode in (-signal.SIGINT, 1, 130)
        program.expect_nobody(1)


def test_ctrl_c_without_a_block_ends_everything_too(tmp_path: Path) -> None:
    script = """
pool = td.shm.SharedPool(tasks.die, max_workers=2)
futures = [pool.submit("sleep") for _ in range(5)]
while not futures[0].running():
    time.sleep(0.001)
say("busy")
futures[0].result()
"""
    with Program(script, tmp_path) as program:
        assert program.read_line() == "busy"
        until_it_waits(program.process.pid)
        os.killpg(program.group, signal.SIGINT)
        _, errors = program.process.communicate(timeout=10)
        assert errors.count("Traceback") == 1
        program.expect_nobody(1)


def test_after_an_interrupt_that_was_caught_every_task_is_answered_or_the_pool_says_that_it_is_broken(
    tmp_path: Path,
) -> None:
    script = """
pool = td.shm.SharedPool(tasks.naps, max_workers=2)
pool.submit(0.0).result()
say("begin")
for _ in range(20):
    futures = [pool.submit(seconds) for seconds in [0.2, 0.0, 0.2, 0.0]]
    try:
        say("waits")
        futures[2].result()
    except KeyboardInterrupt:
        say("caught")
    try:
        assert [future.result(10) for future in futures] == [0.2, 0.0, 0.2, 0.0]
    except td.errors.PoolError as error:
        assert "Ctrl-C" in str(error), error
        pool.shutdown()
        pool = td.shm.SharedPool(tasks.naps, max_workers=2)
pool.shutdown()
say("end")
"""
    draw = random.Random(3)
    with Program(script, tmp_path) as program:
        assert program.read_line() == "begin"
        for _ in range(20):
            assert program.read_line() == "waits"
            # Within the wait: an interrupt in the middle of a lock of the standard library can leave it held.
            time.sleep(draw.uniform(0.02, 0.12))
            os.kill(program.process.pid, signal.SIGINT)
            assert program.read_line() == "caught"
        assert program.read_line() == "end"
        _, errors = program.process.communicate(timeout=20)
        assert (errors, program.process.returncode) == ("", 0)
        program.expect_nobody(1)
