"""Many large results can be kept within the system's limits of descriptors, mappings and address space."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import support.shm.pool_tasks as tasks
from support.shm.leftovers import descriptors, mapped
from support.shm.pool_programs import Program

import tundish as td
from tundish.errors import PoolError

# Numbers of a result that comes in shared memory.
COUNT = 10_000


@contextlib.contextmanager
def at_most(descriptors: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("way", ["map", "futures", "chunks"])
def test_results_that_are_kept_take_bounded_descriptors_and_mappings(way: str) -> None:
    items = [(number, COUNT) for number in range(900)]
    before = len(descriptors())
    with at_most(600), td.shm.SharedPool(tasks.large, max_workers=2) as pool:
        if way == "futures":
            results = [future.result(60) for future in [pool.submit(item) for item in items]]
        else:
            results = list(pool.map(items, chunksize=1 if way == "map" else 5))
        assert len(descriptors()) - before < 320
        assert len(mapped()) < 600
        # The memory was used before, so there are no page faults from here on.
        assert np.array_equal(pool.submit((7, COUNT)).result(60), np.full(COUNT, 7))
    assert all(np.array_equal(result, np.full(COUNT, number)) for number, result in enumerate(results))
    assert all(result.flags.writeable for result in results)


def test_results_that_no_descriptor_is_left_for_are_errors_and_the_pool_goes_on() -> None:
    with td.shm.SharedPool(tasks.large, max_workers=2) as pool:
        assert pool.submit((1, COUNT)).result(20).sum() == COUNT
        # Each has another size, so none lies in memory that is open already.
        items = [(1, COUNT << shift) for shift in range(1, 7)]
        # The lowest free descriptor becomes the limit, so none can be opened. Garbage of other tests would free more.
        gc.collect()
        lowest = os.dup(0)
        os.close(lowest)
        with at_most(lowest):
            errors = [pool.submit(item).exception(20) for item in items]
        assert {type(error) for error in errors} == {PoolError}
        assert all("cannot be opened" in str(error) for error in errors)
        assert [pool.submit(item).result(20).sum() for item in items] == [count for _, count in items]


FORKED_BESIDE_TORCH = """
import torch
torch.set_num_threads(2)
weights = torch.randn(700, 700)
expected = float((weights @ weights).relu().sum())
def product(_item, weights):
    return float((weights @ weights).relu().sum()), torch.get_num_threads()
with td.shm.SharedPool(product, {"weights": weights}, max_workers=2) as pool:
    for result, threads in pool.map(range(4), chunksize=1):
        assert abs(result - expected) < 1e-3 * abs(expected) and threads == 1
    try:
        product(0, weights)
    finally:
        assert torch.get_num_threads() == 2
say("right")
"""


def test_torch_works_in_workers_though_its_threads_worked_in_the_parent(tmp_path: Path) -> None:
    with Program(FORKED_BESIDE_TORCH, tmp_path) as program:
        assert program.read_line() == "right"
        assert program.process.wait(timeout=20) == 0
