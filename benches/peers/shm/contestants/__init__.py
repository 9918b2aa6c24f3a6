"""Pools of processes that work on one array, each as its own users run it.

A pool is opened for one task and one array. `one` returns the result of one task. `each` sends every task on its own
and returns the results in order. `chunked` may send many tasks at once, as the pool does by default. Array results are
numpy arrays.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Task = Callable[[int, np.ndarray], Any]
# The start method of loky.
LOKY = "loky"
# The folder from which other processes import.
PACKAGES = ("joblib", "loky", "torch")


class Pool(Protocol):
    """An open pool, bound to its task and array."""

    def one(self, item: int) -> Any: ...
    def each(self, items: Sequence[int]) -> Iterable[Any]: ...
    def chunked(self, items: Sequence[int]) -> Iterable[Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """The name of a pool, its module, and its start methods."""

    name: str
    module: str
    pool: str
    methods: tuple[str, ...] = ("fork", "spawn")

    def load(self) -> Callable[[Task, np.ndarray, int, str], Pool]:
        """Import the pool; returns its constructor, for a task, an array, a number of workers and a start method."""
        return getattr(importlib.import_module(f"shm.contestants.{self.module}"), self.pool)


CONTESTANTS = {
    "ours": Contestant(name="tundish SharedPool", module="ours", pool="Ours"),
    "queues": Contestant(name="two-queue pool", module="two_queues", pool="TwoQueues"),
    "executor": Contestant(
        name="ProcessPoolExecutor, array in initargs", module="executors", pool="Initialised"
    ),
    "executor each": Contestant(
        name="ProcessPoolExecutor, array pickled with each task", module="executors", pool="Pickling"
    ),
    "executor shared": Contestant(
        name="ProcessPoolExecutor, multiprocessing.shared_memory", module="executors", pool="SharedMemories"
    ),
    "pool": Contestant(name="multiprocessing.Pool, array in initargs", module="pools", pool="Standard"),
    "joblib": Contestant(
        name="joblib, loky with memmapping", module="joblib_parallel", pool="Memmapping", methods=(LOKY,)
    ),
    "loky": Contestant(
        name="loky, array mapped from a file", module="loky_executor", pool="Mapped", methods=(LOKY,)
    ),
    "torch": Contestant(
        name="torch.multiprocessing.Pool, shared tensor", module="torch_pool", pool="Tensors"
    ),
}
