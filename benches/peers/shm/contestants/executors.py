"""concurrent.futures.ProcessPoolExecutor, and the three ways in which its users get an array to the workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Any

import numpy as np

from shm import pool_initializers
from shm.contestants import Task

# Chunks a worker, as multiprocessing.Pool.map makes them; the executor leaves that to its user.
_CHUNKS = 4


class Initialised:
    """The array in `initargs`: inherited under fork, pickled once a worker under spawn."""

    call: Callable[[int], Any] = staticmethod(pool_initializers.call)

    def __init__(self, task: Task, array: np.ndarray, workers: int, method: str) -> None:
        self._workers = workers
        initializer, arguments = self._bind(task, array)
        self._executor = ProcessPoolExecutor(
            workers, multiprocessing.get_context(method), initializer, arguments
        )

    def _bind(self, task: Task, array: np.ndarray) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return pool_initializers.bind, (task, array)

    def _result(self, result: Any) -> Any:
        return result

    def one(self, item: int) -> Any:
        return self._result(self._executor.submit(self.call, item).result())

    def each(self, items: Sequence[int]) -> Iterable[Any]:
        return map(self._result, self._executor.map(self.call, items))

    def chunked(self, items: Sequence[int]) -> Iterable[Any]:
        chunk = -(-len(items) // (self._workers * _CHUNKS))
        return map(self._result, self._executor.map(self.call, items, chunksize=chunk))

    def close(self) -> None:
        self._executor.shutdown()


class SharedMemories(Initialised):
    """The array in multiprocessing.shared_memory, and so is each array that comes back."""

    call = staticmethod(pool_initializers.call_placing)

    def _bind(self, task: Task, array: np.ndarray) -> tuple[Callable[..., None], tuple[Any, ...]]:
        self._block, placed = pool_initializers.place(array)
        return pool_initializers.bind_block, (task, placed)

    def _result(self, result: Any) -> Any:
        return (
            pool_initializers.take(result)
            if isinstance(result, tuple) and isinstance(result[0], str)
            else result
        )

    def close(self) -> None:
        super().close()
        self._block.close()
        self._block.unlink()


class Pickling:
    """The array as an argument of every task."""

    def __init__(self, task: Task, array: np.ndarray, workers: int, method: str) -> None:
        self._task, self._array = task, array
        self._executor = ProcessPoolExecutor(workers, multiprocessing.get_context(method))

    def one(self, item: int) -> Any:
        return self._executor.submit(self._task, item, self._array).result()

    def each(self, items: Sequence[int]) -> Iterable[Any]:
        return self._executor.map(self._task, items, repeat(self._array))

    def chunked(self, items: Sequence[int]) -> Iterable[Any]:
        return self.each(items)

    def close(self) -> None:
        self._executor.shutdown()
