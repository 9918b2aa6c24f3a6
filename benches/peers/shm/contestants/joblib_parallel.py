"""joblib.Parallel on loky, which maps arrays of over 1 MB from a file that it writes once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

from shm.contestants import LOKY, Task


class Memmapping:
    """One `Parallel` for single tasks and one for batches of its own choice, on the same workers."""

    def __init__(self, task: Task, array: np.ndarray, workers: int, method: str) -> None:
        assert method == LOKY
        self._task, self._array = delayed(task), array
        self._single = Parallel(workers, backend="loky", batch_size=1, return_as="generator", mmap_mode="r")
        self._batches = Parallel(workers, backend="loky", return_as="generator", mmap_mode="r")
        self._single.__enter__()
        self._batches.__enter__()

    def one(self, item: int) -> Any:
        [result] = self.each([item])
        return result

    def each(self, items: Sequence[int]) -> Iterable[Any]:
        return self._single(self._task(item, self._array) for item in items)

    def chunked(self, items: Sequence[int]) -> Iterable[Any]:
        return self._batches(self._task(item, self._array) for item in items)

    def close(self) -> None:
        self._batches.__exit__(None, None, None)
        self._single.__exit__(None, None, None)
        get_reusable_executor().shutdown(wait=True)
