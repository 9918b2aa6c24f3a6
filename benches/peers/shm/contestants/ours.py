"""tundish through its public names, with their defaults."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import tundish as td
from shm.contestants import Task


class Ours:
    """`SharedPool`."""

    def __init__(self, task: Task, array: np.ndarray, workers: int, method: str) -> None:
        self._pool = td.shm.SharedPool(
            task,
            shared={"array": array},
            max_workers=workers,
            mp_context=multiprocessing.get_context(method),
        )

    def one(self, item: int) -> Any:
        return self._pool.submit(item).result()

    def each(self, items: Sequence[int]) -> Iterable[Any]:
        return self._pool.map(items, chunksize=1)

    def chunked(self, items: Sequence[int]) -> Iterable[Any]:
        return self._pool.map(items)

    def close(self) -> None:
        self._pool.shutdown()
