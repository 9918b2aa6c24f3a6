"""`SharedPool.map`: how far ahead it runs, the size of its tasks, and how it ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support.shm.pool_tasks as tasks
from support.shm.pool_helpers import each_method

import tundish as td
from tundish.shm.messages import MAX_PAYLOAD_BYTES
from tundish.shm.shared_pool import FlowControl


@pytest.mark.parametrize("chunksize", [1, 5, "auto"])
@pytest.mark.parametrize("ordered", [True, False])
def test_an_endless_iterator_is_read_as_its_results_are_consumed(ordered: bool, chunksize: Any) -> None:
    taken = itertools.count()
    with td.shm.SharedPool(tasks.naps, max_workers=2) as pool:
        results = pool.map(
            (next(taken) * 0.0 for _ in itertools.repeat(None)), ordered=ordered, chunksize=chunksize
        )
        for _ in range(300):
            next(results)
        time.sleep(0.2)
        assert next(taken) < 300 + 30_000
        before = next(taken)
        time.sleep(0.2)
        assert next(taken) == before + 1
        results.close()
        assert pool.submit(0).result() == 0


def test_slow_tasks_and_slow_consumers_are_not_run_far_ahead_of() -> None:
    taken = itertools.count()
    with td.shm.SharedPool(tasks.naps, max_workers=2) as pool:
        results = pool.map((0.005 for _ in taken), chunksize=1)
        for _ in range(10):
            next(results)
        assert next(taken) < 10 + 40
        results.close()


def test_a_slow_iterator_does_not_hold_results_back() -> None:
    taken = 0

    def items() -> Iterator[float]:
        nonlocal taken
        for taken in range(200):  # noqa: B007 (looked at outside)
            yield 0.0
            time.sleep(0.05)

    with td.shm.SharedPool(tasks.naps, max_workers=2) as pool:
        results = pool.map(items())
        next(results)
        assert taken < 100
        results.close()


@each_method
def test_a_map_that_ends_early_takes_back_items_that_are_not_begun(method: str, tmp_path: Path) -> None:
    with td.shm.SharedPool(tasks.touch_and_wait, max_workers=1, mp_context=method) as pool:
        items = [(str(tmp_path / str(number)), 0.1) for number in range(100)]
        for place, _ in enumerate(pool.map(items, chunksize=1)):
            if place == 1:
                break
        # An idle worker would begin the first item at once.
        busy = pool.submit((str(tmp_path / "busy"), 0.3))
        while not (tmp_path / "busy").exists():
            time.sleep(0.001)
        dropped = pool.map([(str(tmp_path / "dropped"), 0.1)] * 3)
        del dropped
        busy.result(20)
        pool.submit((str(tmp_path / "after"), 0.01)).result(20)
        begun = {path.name for path in tmp_path.iterdir()}
    # Eight tasks were sent when the map was closed, and two were finished.
    assert "after" in begun and "dropped" not in begun and len(begun) <= 2 + 5


@pytest.mark.parametrize("chunksize", [1, 4, "auto"])
def test_an_error_of_the_items_is_raised_behind_the_results_before_it(chunksize: Any) -> None:
    def items() -> Iterator[int]:
        yield from range(10)
        raise OSError("the source is gone")

    with td.shm.SharedPool(tasks.echo, max_workers=2) as pool:
        seen = []
        with pytest.raises(OSError, match="the source is gone"):
            seen.extend(pool.map(items(), chunksize=chunksize))
        results = pool.map(items(), chunksize=chunksize)
        assert [next(results) for _ in range(10)] == list(range(10))
        with pytest.raises(OSError, match="the source is gone"):
            next(results)


@pytest.mark.parametrize(("cost", "nbytes"), [(1e-7, 4), (1e-4, 4), (1e-7, 1000), (0.1, 4)])
def test_auto_chunks_grow_to_a_millisecond_of_work_or_a_full_message(cost: float, nbytes: int) -> None:
    flow = FlowControl(3, None)
    assert flow.size == 1
    for _ in range(12):
        assert flow.size * cost < 2e-3 or flow.size == 1
        assert flow.size * nbytes < MAX_PAYLOAD_BYTES
        flow.learn(flow.size, flow.size * cost, flow.size * nbytes)
    assert flow.size >= min(1e-3 / cost, 0.7 * MAX_PAYLOAD_BYTES / nbytes) * 0.9 or flow.size == 1


@pytest.mark.parametrize("chunksize", [1, 4, "auto"])
def test_with_return_exceptions_each_item_gives_its_result_or_its_exception(chunksize: Any) -> None:
    items: list[Any] = list(range(20))
    items[3], items[7], items[12], items[13] = "raise", "lambda", "exit", "local error"
    items[8] = lambda: None
    expected: list[Any] = list(range(20))
    expected[3], expected[12] = "LookupError", "SystemExit"
    for place in (7, 8, 13):
        expected[place] = "NotPicklableError"
    with td.shm.SharedPool(tasks.misbehave, max_workers=2) as pool:
        results = list(pool.map(items, chunksize=chunksize, return_exceptions=True))
    assert [type(one).__name__ if isinstance(one, BaseException) else one for one in results] == expected
    assert str(results[3]) == "asked for" and "misbehave" in str(results[3].__cause__)


def test_without_return_exceptions_a_chunk_ends_at_its_first_exception(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("before", "missing/x", "after")]
    with td.shm.SharedPool(tasks.touch, max_workers=1) as pool:
        results = pool.map(paths, chunksize=3)
        assert next(results) == paths[0]
        with pytest.raises(OSError, match="No such file"):
            next(results)
        assert [path.name for path in tmp_path.iterdir()] == ["before"]
        assert len(list(pool.map(paths, chunksize=3, return_exceptions=True))) == 3
        assert (tmp_path / "after").exists()


@pytest.mark.parametrize(("chunksize", "lost"), [(1, {2}), (4, {0, 1, 2, 3})])
def test_with_return_exceptions_each_item_of_a_dead_workers_chunk_gives_the_error(
    chunksize: int, lost: set[int]
) -> None:
    with td.shm.SharedPool(tasks.die, max_workers=1) as pool:
        results = list(pool.map([0, 1, "kill", 3, 4, 5, 6, 7], chunksize=chunksize, return_exceptions=True))
    assert {place for place, one in enumerate(results) if isinstance(one, td.errors.WorkerDiedError)} == lost
    assert all(results[place] == place for place in set(range(8)) - lost)


def test_the_end_of_the_pool_ends_a_map_that_returns_exceptions() -> None:
    with td.shm.SharedPool(tasks.naps, max_workers=1) as pool:
        results = pool.map([0.0, 1.0, 1.0, 1.0], chunksize=1, return_exceptions=True)
        next(results)
        pool.shutdown(cancel=True)
        with pytest.raises(td.errors.PoolError, match="shut down"):
            list(results)


def test_progress_counts_the_results_with_and_without_a_known_total(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with td.shm.SharedPool(tasks.naps, max_workers=1) as pool:
        # The line is drawn again after a tenth of a second.
        naps = [0.15] * 3
        assert list(pool.map(naps, progress=True, chunksize=1)) == naps
        shown = capsys.readouterr().err
        assert "map: naps:" in shown and "2/3" in shown and "items" in shown
        assert list(pool.map((nap for nap in naps), progress=False)) == naps
        assert capsys.readouterr().err == ""
        assert list(pool.map((nap for nap in naps), progress=True, chunksize=1)) == naps
        assert "map: naps: 2 items [" in capsys.readouterr().err
        with pytest.raises(td.errors.InvalidTypeError, match="progress must be"):
            pool.map([], progress="yes")  # type: ignore[arg-type]


def test_a_pool_says_what_it_runs() -> None:
    with td.shm.SharedPool(tasks.echo, max_workers=2) as pool:
        assert repr(pool) == "<SharedPool of echo, 2 workers>"
    assert repr(pool) == "<SharedPool of echo, 2 workers, shut down>"
