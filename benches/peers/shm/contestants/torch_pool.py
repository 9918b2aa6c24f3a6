"""torch.multiprocessing.Pool: the array in a tensor that is moved to shared memory, results as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from shm import pool_initializers
from shm.contestants import Task


class Tensors:
    """Tensors travel as descriptors of their shared memory."""

    def __init__(self, task: Task, array: np.ndarray, workers: int, method: str) -> None:
        tensor = torch.from_numpy(array).share_memory_()
        context = torch.multiprocessing.get_context(method)
        self._pool = context.Pool(workers, pool_initializers.bind_tensor, (task, tensor))

    def one(self, item: int) -> Any:
        return self._result(self._pool.apply(pool_initializers.call_tensor, (item,)))

    def each(self, items: Sequence[int]) -> Iterable[Any]:
        return map(self._result, self._pool.imap(pool_initializers.call_tensor, items))

    def chunked(self, items: Sequence[int]) -> Iterable[Any]:
        return map(self._result, self._pool.map(pool_initializers.call_tensor, items))

    def close(self) -> None:
        self._pool.close()
        self._pool.join()

    def _result(self, result: Any) -> Any:
        return result.numpy() if isinstance(result, torch.Tensor) else result
