"""Pools and shared arrays are timed, weighed and compared."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

SHM = Path(__file__).resolve().parents[2] / "benches" / "peers" / "shm"


@pytest.mark.parametrize("contestant", ["ours", "queues", "executor shared", "torch"])
def test_a_pool_is_timed_weighed_and_checked(bench: SimpleNamespace, contestant: str) -> None:
    reply = run_pool(bench, pooling(contestant, "fork", ["tasks", "results", "binding", "readers"]))
    for measure, names in {
        "tasks": ("each", "chunked", "one"),
        "results": ("large", "small"),
        "binding": ("constructor", "first", "small first"),
    }.items():
        for name in names:
            assert reply[measure][name] and all(seconds > 0 for seconds in reply[measure][name])
    assert reply["binding"]["constructor"] <= reply["binding"]["first"]
    # Two processes with numpy, and an array once or not at all.
    assert 2**20 < reply["readers"]["held"][0] < 2**30


def test_the_floors_of_pools_are_taken(bench: SimpleNamespace) -> None:
    reply = run_pool(bench, pooling("floors", "", ["floors", "bare workers"]))
    assert all(seconds > 0 for name in reply["floors"] for seconds in reply["floors"][name])
    # The memory of numpy in two processes.
    assert 2 * 4 * 2**20 < reply["bare workers"]["held"][0] < 2 * 64 * 2**20


def test_a_pool_whose_results_are_anothers_is_found_out(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class Backwards(bench.two_queues.TwoQueues):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened.append(self)

        def each(self, items: Any) -> Any:
            return reversed(list(super().each(items)))

        chunked = each

    monkeypatch.setitem(bench.contestants.CONTESTANTS, "queues", SimpleNamespace(load=lambda: Backwards))
    array = np.arange(4 << 20, dtype=np.int64)
    try:
        with pytest.raises(bench.measure.OutputsDiffer, match="out of order"):
            bench.timing.empty_tasks(pooling("queues", "spawn", []), array)
        with pytest.raises(bench.measure.OutputsDiffer, match="task 0"):
            bench.timing.results(pooling("queues", "spawn", []), array)
    finally:
        for pool in opened:
            pool.close()


def test_the_two_queue_pool_brings_errors_and_removes_its_blocks(bench: SimpleNamespace) -> None:
    array = np.arange(1000)
    pool = bench.two_queue_pool.TwoQueuePool(
        np.take, {"indices": array}, 2, multiprocessing.get_context("spawn")
    )
    [block] = [Path("/dev/shm", block.name) for block in pool._blocks]
    assert block.exists()
    given = np.arange(2000) * 3
    np.testing.assert_array_equal(pool.submit(given).result(60), given[:1000])
    with pytest.raises(IndexError):
        pool.submit(given[:10]).result(60)
    pool.shutdown()
    assert not block.exists()


def test_ranks_share_an_array_and_are_weighed(bench: SimpleNamespace) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as folder:
        request = {"array_bytes": 32 << 20, "forms": ["file", "ours"], "folder": folder}
        environments = bench.processes.rank_environments(2)
        replies = bench.processes.run_programs(SHM / "node_child.py", request, environments)
        assert not list(Path(folder).iterdir())
    assert replies[0]["copy"] > 0
    for form in ("file", "ours"):
        assert all(0 < reply[form]["seconds"] < 30 for reply in replies)
        # Once, and not once a rank.
        assert 31 * 2**20 < sum(reply[form]["held"] for reply in replies) < 2 * 32 * 2**20


def test_a_pool_that_fails_is_told_of(bench: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)child.py: .* ended with 1.*KeyError: 'nobody'"):
        run_pool(bench, pooling("nobody", "fork", ["tasks"]))


def run_pool(bench: SimpleNamespace, request: dict[str, Any]) -> Any:
    [reply] = bench.processes.run_programs(SHM / "child.py", request)
    return reply


def pooling(contestant: str, method: str, measures: list[str]) -> dict[str, Any]:
    return {
        "measures": measures,
        "contestant": contestant,
        "method": method,
        "array_bytes": 32 << 20,
        "workers": 2,
        "repeats": 1,
        "seconds": 0.02,
        "results": {"large": 2, "small": 4},
    }
