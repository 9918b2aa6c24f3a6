"""`SharedPool`: a function and its shared arguments, bound once to processes that run it.

Owns what users call. What always holds: arguments are checked before a process is started; when a pool is over, by
whatever way, no process, descriptor or segment of it is left; only the process that made a pool uses it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterable
from collections.abc import Mapping as MappingType
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self

from tundish.errors import InvalidTypeError, NotPicklableError, PoolError
from tundish.shm.pool.arguments import (
    checked_context,
    checked_count,
    checked_seconds,
    checked_shared,
    checked_workers,
)
from tundish.shm.pool.futures import TaskFuture
from tundish.shm.pool.life import PATIENCE_SECONDS, ROOM, Life
from tundish.shm.pool.mapping import Mapping
from tundish.shm.pool.messages import ITEM, Courier
from tundish.shm.pool.pace import Pace

__all__ = ["SharedPool"]

# Pieces of one map that are on the board or not yet consumed; the rest of the slots is left to others.
_MOST_AHEAD: Final = 384


class SharedPool:
    """A pool of processes bound to one function and its shared arguments.

    A task is one call `fn(item, **shared)` in a worker. What does not change from item to item is bound once: numpy
    arrays and CPU tensors among the values of `shared` exist once in memory, whatever the number of workers, arrays
    read-only; everything else is pickled once a worker. Large arrays in results and items travel through shared memory.

        >>> import numpy as np
        >>> import tundish as td
        >>> def total(start, numbers):
        ...     return int(numbers[start : start + 3].sum())
        >>> with td.shm.SharedPool(total, {"numbers": np.arange(12)}, max_workers=2) as pool:
        ...     list(pool.map([0, 3, 6, 9]))
        [3, 12, 21, 30]

    Under fork the workers come from one process that is forked here and now, before anything else: they see `fn` and
    `shared` as they are at this moment, without a copy, and nothing that is done to them later. This process is never
    forked again, so threads that it starts later do no harm.

    A worker that dies fails the task it was running with `WorkerDiedError`, which is not tried again, and is replaced.
    When the process that made the pool ends, even by SIGKILL, the workers end within a second. Ctrl-C reaches this
    process alone; leaving the `with` block by it ends the workers at once.

    A pool may be used by many threads at once, several pools side by side, and one within a task of another. It
    belongs to the process that made it.

    Args:
        fn: called in workers as `fn(item, **shared)`. Under spawn and forkserver it has to be importable.
        shared: the arguments that are bound, by name. An array of any numeric or structured dtype keeps its dtype and
            order.
        max_workers: processes; as many as there are processors for this one, if None.
        mp_context: "fork", "forkserver", "spawn", or such a context of `multiprocessing`; None for fork where the
            system has it.
        max_restarts: how many dead workers are replaced in the pool's life; None for all. The pool is broken when no
            worker is left, or when one dies three times in a row before it can work.

    Raises:
        InvalidInputError, InvalidTypeError: an argument cannot be used, or `fn` does not take these shared arguments.
        NotPicklableError: under spawn or forkserver, `fn` or a shared value cannot be sent.
        OutOfMemoryError: there is no room for the arrays.
        PoolError: the main module makes the pool while a worker imports it (no main guard), or this process may have
            no children.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        shared: MappingType[str, Any] | None = None,
        max_workers: int | None = None,
        mp_context: str | BaseContext | None = None,
        *,
        max_restarts: int | None = None,
    ) -> None:
        shared = checked_shared(fn, shared)
        self._workers = checked_workers(max_workers)
        if max_restarts is not None:
            max_restarts = checked_count(max_restarts, "max_restarts", least=0)
        context = checked_context(mp_context)
        self._numbers = itertools.count()
        self._courier = Courier(ROOM)
        self._life = Life(self, fn, shared, context, self._courier, self._workers, max_restarts)
        self._engine = self._life.engine

    def submit(self, item: Any) -> TaskFuture:
        """Have `fn(item, **shared)` run in a worker.

        Tasks that find no room on the board wait in this process, without a limit; `map` is for endless streams.

        Returns:
            A `concurrent.futures.Future`. `cancel()` succeeds until a worker takes the task.

        Raises:
            NotPicklableError: the item cannot be sent.
            PoolError: the pool is shut down or broken, or another process made it.
        """
        self._check_process()
        self._engine.check_open()
        flag, payload, parcel = self._courier.pack(item)
        future = TaskFuture(self._engine, next(self._numbers))
        self._engine.submit(future, ITEM | flag, payload, parcel)
        return future

    def map(
        self, items: Iterable[Any], *, ordered: bool = True, chunksize: int | Literal["auto"] = "auto"
    ) -> Generator[Any, None, None]:
        """The results of `fn(item, **shared)` for every item.

        Items are taken from `items` as results are consumed, never far ahead, so that endless iterators are as good
        as lists and a slow consumer holds the workers up. The first ones are taken by this call.

        Args:
            items: any iterable; it is read on the thread that consumes the results.
            ordered: results in the order of the items; else as they come.
            chunksize: items a worker gets at once. "auto" begins with one and grows to about a millisecond of work, or
                what fits a message, and leaves every worker several chunks where `items` has a length. A worker that
                dies fails the chunk it has.

        Returns:
            A generator. An exception of a task is raised where its result would be, and ends the map, as an error of
            `items` does behind the results before it. What ends the map, or closing or dropping it, takes back what
            is not begun.

        Raises:
            InvalidInputError, InvalidTypeError: an argument cannot be used.
            PoolError: the pool is shut down or broken, or another process made it.
        """
        self._check_process()
        self._engine.check_open()
        if chunksize != "auto":
            chunksize = checked_count(chunksize, "chunksize", least=1)
        try:
            iterator = iter(items)
        except TypeError as error:
            raise InvalidTypeError(
                f"items are a {type(items).__name__}, which cannot be iterated over"
            ) from error
        size = None if chunksize == "auto" else int(chunksize)
        pace = Pace(self._workers, ROOM, size, _length(items), _MOST_AHEAD)
        mapping = Mapping(
            self._engine, self._courier, iterator, pace, is_ordered=ordered, is_chunked=size != 1, keeps=self
        )
        results = mapping.results()
        next(results)
        return results

    def shutdown(
        self, wait: bool = True, cancel: bool = False, timeout: float | None = PATIENCE_SECONDS
    ) -> None:
        """Take no more tasks, finish those there are, and end the workers. A second call changes nothing.

        Workers that have not come up by then are ended at once.

        Args:
            wait: return when all workers have ended. Else this happens in the background.
            cancel: cancel tasks that no worker has begun.
            timeout: seconds without any task finishing after which what still runs is taken for stuck and ended by
                force; its futures raise `WorkerDiedError`, those of tasks that were never begun `PoolError`. None: as
                long as it takes.

        Called by a done-callback it does not wait. In a child process of the one that made the pool it does nothing.
        """
        patience = None if timeout is None else checked_seconds(timeout)
        if os.getpid() != self._engine.pid:
            return
        self._engine.close(cancel=cancel, patience=patience)
        if wait:
            self._life.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down: after all tasks; after an exception without those that were not begun; after Ctrl-C at once."""
        if os.getpid() != self._engine.pid:
            return
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._life.end()
        elif error is not None:
            self.shutdown(cancel=True)
        else:
            self.shutdown(timeout=None)

    def __reduce__(self) -> NoReturn:
        # As part of a dataset, say, that goes to a loader's workers; a copy would be a second owner of one engine.
        raise NotPicklableError(
            "a SharedPool cannot be copied or pickled: its workers are those of one process"
        )

    def _check_process(self) -> None:
        if os.getpid() != self._engine.pid:
            raise PoolError(
                f"this pool belongs to process {self._engine.pid}, which made it, and this is process {os.getpid()}: "
                "make a pool here"
            )


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, OverflowError):
        return None
