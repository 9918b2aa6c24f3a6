"""A pool of two queues, as projects write it once ProcessPoolExecutor is too slow.

Tundish's pool is measured against it. It is not a pool to use: a worker's death goes unnoticed, and nothing is bounded.
The function is bound once; an array lies in multiprocessing.shared_memory and workers attach it by name; a queue takes
tasks, a queue brings results, and a thread resolves the futures. The queues are the ones without a feeding thread,
which is the faster form of such a pool.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing.context import BaseContext
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

# Name of the block, shape and dtype of the array in it.
Reference = tuple[str, tuple[int, ...], np.dtype]


class TwoQueuePool:
    """`function(item, **shared)` in processes; arrays in `shared` are copied once."""

    def __init__(
        self,
        function: Callable[..., Any],
        shared: Mapping[str, np.ndarray],
        workers: int,
        context: BaseContext,
    ) -> None:
        self._blocks: list[SharedMemory] = []
        references = {name: self._place(array) for name, array in shared.items()}
        self._tasks, self._results = context.SimpleQueue(), context.SimpleQueue()
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._workers = [
            context.Process(
                target=_work, args=(function, references, self._tasks, self._results), daemon=True
            )
            for _ in range(workers)
        ]
        for worker in self._workers:
            worker.start()
        self._drain = threading.Thread(target=self._resolve, daemon=True)
        self._drain.start()

    def submit(self, item: Any) -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._numbers)
        self._futures[number] = future
        self._tasks.put((number, item))
        return future

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Results in the order of the items, which are all submitted at once."""
        futures = deque(self.submit(item) for item in items)
        while futures:
            yield futures.popleft().result()

    def shutdown(self) -> None:
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            worker.join()
        self._results.put(None)
        self._drain.join()
        for block in self._blocks:
            block.close()
            block.unlink()

    def _place(self, array: np.ndarray) -> Reference:
        block = SharedMemory(create=True, size=max(1, array.nbytes))
        self._blocks.append(block)
        np.ndarray(array.shape, array.dtype, block.buf)[...] = array
        return block.name, array.shape, array.dtype

    def _resolve(self) -> None:
        while (message := self._results.get()) is not None:
            number, result, error = message
            future = self._futures.pop(number)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def _work(
    function: Callable[..., Any], references: Mapping[str, Reference], tasks: Any, results: Any
) -> None:
    blocks = {name: SharedMemory(block) for name, (block, _, _) in references.items()}
    shared = {
        name: np.ndarray(shape, dtype, blocks[name].buf) for name, (_, shape, dtype) in references.items()
    }
    while (message := tasks.get()) is not None:
        number, item = message
        try:
            reply = number, function(item, **shared), None
        except Exception as error:  # noqa: BLE001 (the caller's)
            reply = number, None, error
        results.put(reply)
