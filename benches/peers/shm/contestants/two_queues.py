"""The pool of two queues; it has no chunks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shm.contestants import Task
from shm.two_queue_pool import TwoQueuePool


class TwoQueues:
    """The pool that tundish is compared with."""

    def __init__(self, task: Task, array: np.ndarray, workers: int, method: str) -> None:
        self._pool = TwoQueuePool(task, {"array": array}, workers, multiprocessing.get_context(method))

    def one(self, item: int) -> Any:
        return self._pool.submit(item).result()

    def each(self, items: Sequence[int]) -> Iterable[Any]:
        return self._pool.map(items)

    def chunked(self, items: Sequence[int]) -> Iterable[Any]:
        return self._pool.map(items)

    def close(self) -> None:
        self._pool.shutdown()
