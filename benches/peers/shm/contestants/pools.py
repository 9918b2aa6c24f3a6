"""multiprocessing.Pool, the array in `initargs`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shm import pool_initializers
from shm.contestants import Task


class Standard:
    """`imap` sends one task at a time, `map` a quarter of each worker's share."""

    def __init__(self, task: Task, array: np.ndarray, workers: int, method: str) -> None:
        self._pool = multiprocessing.get_context(method).Pool(workers, pool_initializers.bind, (task, array))

    def one(self, item: int) -> Any:
        return self._pool.apply(pool_initializers.call, (item,))

    def each(self, items: Sequence[int]) -> Iterable[Any]:
        return self._pool.imap(pool_initializers.call, items)

    def chunked(self, items: Sequence[int]) -> Iterable[Any]:
        return self._pool.map(pool_initializers.call, items)

    def close(self) -> None:
        self._pool.close()
        self._pool.join()
