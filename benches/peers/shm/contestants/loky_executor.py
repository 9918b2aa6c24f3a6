"""loky's executor: the array in a file in memory, which every worker maps when it starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from loky import get_reusable_executor

from shm import pool_initializers
from shm.contestants import LOKY, Task

_MEMORY = Path("/dev/shm")
# Chunks a worker, as multiprocessing.Pool.map makes them; the executor leaves that to its user.
_CHUNKS = 4


class Mapped:
    """Results come back in pickles."""

    def __init__(self, task: Task, array: np.ndarray, workers: int, method: str) -> None:
        assert method == LOKY
        self._workers = workers
        self._folder = tempfile.TemporaryDirectory(dir=_MEMORY, prefix="bench-")
        file = Path(self._folder.name, "array.npy")
        np.save(file, array)
        self._executor = get_reusable_executor(
            workers, initializer=pool_initializers.bind_file, initargs=(task, file)
        )

    def one(self, item: int) -> Any:
        return self._executor.submit(pool_initializers.call, item).result()

    def each(self, items: Sequence[int]) -> Iterable[Any]:
        return self._executor.map(pool_initializers.call, items)

    def chunked(self, items: Sequence[int]) -> Iterable[Any]:
        chunk = -(-len(items) // (self._workers * _CHUNKS))
        return self._executor.map(pool_initializers.call, items, chunksize=chunk)

    def close(self) -> None:
        self._executor.shutdown()
        self._folder.cleanup()
