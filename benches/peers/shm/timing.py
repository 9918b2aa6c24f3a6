"""Times one pool: empty tasks, results that are arrays, and binding.

Invariants: each result is checked, item by item and in order, and was made by a process of the pool. The clock stops
when the caller has the results, and has read every page of an array.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from measure import OutputsDiffer, family

from shm import tasks
from shm.contestants import CONTESTANTS, Pool

Request = dict[str, Any]
# The most tasks in one measurement, so that lists of results fit in memory.
_MOST_TASKS = 1_000_000
# Tries, each with twice as many tasks, until every worker has had one.
_ATTEMPTS = 16
_PAGE = 4096
_RESULTS = {"large": (tasks.large, tasks.LARGE), "small": (tasks.small, tasks.SMALL)}


def empty_tasks(request: Request, array: np.ndarray) -> dict[str, list[float]]:
    """Return the seconds for a task: sent singly, in chunks, and one after the other."""
    pool = CONTESTANTS[request["contestant"]].load()(
        tasks.empty, array, request["workers"], request["method"]
    )

    def one_by_one(items: Sequence[int]) -> Iterable[Any]:
        return (pool.one(item) for item in items)

    workers = _warm(pool, request["workers"])
    found = {}
    for name, run in (("each", pool.each), ("chunked", pool.chunked), ("one", one_by_one)):
        count = _count(run, request["seconds"])
        found[name] = [_timed_tasks(run, count, workers) for _ in range(request["repeats"])]
    pool.close()
    return found


def _warm(pool: Pool, workers: int) -> set[int]:
    """The process ids of all workers, after each has done a task."""
    own = set(family(os.getpid()))
    found: set[int] = set()
    for more in range(_ATTEMPTS):
        found |= {tasks.worker_of(stamp) for stamp in pool.each(range(2 * workers << more))}
        if len(found) == workers:
            break
    if len(found) != workers or os.getpid() in found or not found <= own | set(family(os.getpid())):
        raise RuntimeError(f"{workers} workers were asked for, and {sorted(found)} answer")
    return found


def _count(run: Callable[[Sequence[int]], Iterable[Any]], seconds: float) -> int:
    """Return the number of tasks that take about so long."""
    count = 4
    while True:
        begin = time.perf_counter()
        list(run(range(count)))
        spent = time.perf_counter() - begin
        if spent >= seconds / 4 or count == _MOST_TASKS:
            return max(4, min(_MOST_TASKS, int(count * seconds / spent)))
        count = min(_MOST_TASKS, 4 * count)


def _timed_tasks(run: Callable[[Sequence[int]], Iterable[Any]], count: int, workers: set[int]) -> float:
    gc.collect()
    begin = time.perf_counter()
    stamps = list(run(range(count)))
    seconds = time.perf_counter() - begin
    found = np.array(stamps, dtype=np.int64)
    if not np.array_equal(tasks.item_of(found), np.arange(count)):
        raise OutputsDiffer("an empty task came back as another, or out of order")
    if not set(np.unique(tasks.worker_of(found)).tolist()) <= workers:
        raise OutputsDiffer("an empty task was not done by a worker")
    return seconds / count


def results(request: Request, array: np.ndarray) -> dict[str, list[float]]:
    """Return the seconds for results of 16 MiB and 400 KiB; each result is dropped when the next one has come."""
    found = {}
    for name, (task, size) in _RESULTS.items():
        count = request["results"][name]
        pool = CONTESTANTS[request["contestant"]].load()(task, array, request["workers"], request["method"])
        _compare(pool, array, size, count)
        found[name] = [_timed_results(pool, array, size, count) for _ in range(request["repeats"])]
        pool.close()
    return found


def _timed_results(pool: Pool, array: np.ndarray, size: int, count: int) -> float:
    step = _PAGE // array.itemsize
    gc.collect()
    begin = time.perf_counter()
    seen = [(int(result[0]), int(result[step::step].sum())) for result in pool.each(range(count))]
    seconds = time.perf_counter() - begin
    for item, (stamp, total) in enumerate(seen):
        start = tasks.begin_of(item, array, size)
        expected = int(array[start : start + size // array.itemsize][step::step].sum())
        if (tasks.item_of(stamp), total) != (item, expected):
            raise OutputsDiffer(f"the result of task {item} is another one's")
    return seconds / count


def _compare(pool: Pool, array: np.ndarray, size: int, count: int) -> None:
    """Read every element of so many results; the workers are warm afterwards."""
    own = set(family(os.getpid())) - {os.getpid()}
    for item, result in enumerate(pool.each(range(count))):
        start = tasks.begin_of(item, array, size)
        same = np.array_equal(result[1:], array[start + 1 : start + size // array.itemsize])
        if not same or tasks.item_of(int(result[0])) != item:
            raise OutputsDiffer(f"the result of task {item} is not what its worker made")
        worker = tasks.worker_of(int(result[0]))
        if worker not in own and worker not in family(os.getpid())[1:]:
            raise OutputsDiffer(f"the result of task {item} was made by {worker}, which is no worker")


def binding(request: Request, array: np.ndarray) -> dict[str, list[float]]:
    """Seconds until a pool's constructor returns, and until its first task is back.

    A pool with an array of one page goes first, twice: modules, and what the start method keeps, are there when the
    clock begins. The array itself is bound once a process, so that nobody finds pages that were used before.
    """
    small = array[: _PAGE // array.itemsize].copy()
    _bind(request, small)
    _, small_first = _bind(request, small)
    constructor, first = _bind(request, array)
    return {"constructor": [constructor], "first": [first], "small first": [small_first]}


def _bind(request: Request, array: np.ndarray) -> tuple[float, float]:
    open_pool = CONTESTANTS[request["contestant"]].load()
    gc.collect()
    begin = time.perf_counter()
    pool = open_pool(tasks.ends, array, request["workers"], request["method"])
    constructor = time.perf_counter() - begin
    stamp, first, last = pool.one(1)
    ready = time.perf_counter() - begin
    if (tasks.item_of(stamp), first, last) != (1, int(array[0]), int(array[-1])):
        raise OutputsDiffer("a worker found another array than was bound")
    if tasks.worker_of(stamp) == os.getpid():
        raise OutputsDiffer("a task was done by the caller and not by a worker")
    pool.close()
    return constructor, ready
