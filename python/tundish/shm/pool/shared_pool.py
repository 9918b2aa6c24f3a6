"""`SharedPool`: a pool of processes that is bound to one function and its shared arguments."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import Any, Literal, Self

from tundish import _native
from tundish.errors import InvalidTypeError, PoolError, TundishError, format_type
from tundish.shm.pool.arguments import (
    MAIN_GUARD,
    checked_context,
    checked_count,
    checked_shared,
    checked_workers,
)
from tundish.shm.pool.bound_function import SendableFunction, bind_inherited
from tundish.shm.pool.dispatcher import Dispatcher, TaskFuture
from tundish.shm.pool.fork_server import ForkServer
from tundish.shm.pool.messages import SINGLE, SLOT_BYTES, SLOTS, MessagePacker
from tundish.shm.pool.parallel_map import FlowControl, ParallelMap
from tundish.shm.pool.processes import SpawnedWorkers
from tundish.shm.pool.supervisor import STUCK_TIMEOUT_SECONDS, Supervisor
from tundish.shm.pool.worker import ParentLink, serve
from tundish.shm.pool.worker_messages import WorkerMessages
from tundish.timeouts import check_seconds

__all__ = ["SharedPool"]


class SharedPool:
    """A pool of processes bound to one function and its shared arguments.

    A task is one call `fn(item, **shared)` in a worker. Numpy arrays and CPU tensors among the shared arguments exist
    once in memory, for any number of workers; arrays are read-only. Other values are pickled once for each worker.
    Large arrays in items and results travel through shared memory.

    Under fork, all workers are forked from one process that is forked when the pool is made. They see `fn` and `shared`
    as they are at that moment, without a copy. Threads that start later do no harm.

    If a worker dies, its task raises `WorkerDiedError` and is not tried again; another worker takes its place. The pool
    breaks when the start of a worker fails three times in a row. When the process that made the pool ends, even by
    SIGKILL, the workers end within a second. Workers ignore Ctrl-C. If Ctrl-C ends the `with` block, the workers end at
    once.

    Many threads may use a pool, several pools may run side by side, and a task may make a pool. Only the process that
    made a pool can use it.

    Args:
        fn: called in workers as `fn(item, **shared)`. Under spawn and forkserver workers must be able to import it.
        shared: shared arguments by name. Arrays keep their dtype and order.
        max_workers: number of processes; None for the number of processors that this process may use.
        mp_context: "fork" (the default), "forkserver", "spawn", or such a context of `multiprocessing`.

    Raises:
        InvalidInputError, InvalidTypeError: an argument is invalid, or `fn` does not take these shared arguments.
        NotPicklableError: under spawn or forkserver, `fn` or a shared argument cannot be pickled.
        OutOfMemoryError: the shared arrays do not fit in memory.
        PoolError: this process may have no children, or it is a worker that imports a main module without a guard.

    Example:
        >>> import numpy as np
        >>> import tundish as td
        >>> def total(start, numbers):
        ...     return int(numbers[start : start + 3].sum())
        >>> with td.shm.SharedPool(total, {"numbers": np.arange(12)}, max_workers=2) as pool:
        ...     list(pool.map([0, 3, 6, 9]))
        [3, 12, 21, 30]
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        shared: Mapping[str, Any] | None = None,
        max_workers: int | None = None,
        mp_context: str | BaseContext | None = None,
    ) -> None:
        shared = checked_shared(fn, shared)
        self._workers = checked_workers(max_workers)
        context = checked_context(mp_context)
        self._numbers = itertools.count()
        self._packer = MessagePacker()
        try:
            self._begin(fn, shared, context)
        except (OSError, RuntimeError) as error:
            if isinstance(error, TundishError):
                raise
            raise PoolError(f"a pool cannot be started: {error}") from error

    def _begin(self, fn: Callable[..., Any], shared: Mapping[str, Any], context: BaseContext) -> None:
        queue = _native.TaskQueue(SLOTS, SLOT_BYTES)
        with contextlib.ExitStack() as undo:
            control = WorkerMessages(self._packer)
            undo.callback(control.close)
            link = ParentLink(queue=queue.fd, control=control.workers_end, parent=os.getpid())
            workers: SpawnedWorkers | ForkServer
            if context.get_start_method() == "fork":
                workers = ForkServer(lambda worker: serve(link, worker, lambda: bind_inherited(fn, shared)))
                hint = ""
            else:
                workers = SpawnedWorkers(context, SendableFunction(fn, shared), link)
                hint = MAIN_GUARD
            undo.callback(workers.close)
            self._dispatcher = Dispatcher(queue, control.open_buffer)
            self._supervisor = Supervisor(
                queue, self._dispatcher, control, workers, count=self._workers, hint=hint
            )
            undo.pop_all()
        weakref.finalize(self, self._dispatcher.drop).atexit = False
        self._supervisor.start()

    def submit(self, item: Any) -> TaskFuture:
        """Run `fn(item, **shared)` in a worker.

        Any number of tasks can wait in this process for a worker. Use `map` for endless streams.

        Args:
            item: any value that can be pickled.

        Returns:
            A `concurrent.futures.Future` of the result. `cancel()` succeeds until a worker takes the task.

        Raises:
            NotPicklableError: the item cannot be pickled.
            OutOfMemoryError: a large item does not fit in memory.
            PoolError: the pool is shut down or broken, or another process made it.

        Example:
            >>> import tundish as td
            >>> with td.shm.SharedPool(abs, max_workers=1) as pool:
            ...     pool.submit(-3).result()
            3
        """
        self._dispatcher.check_open()
        flag, payload, lease = self._packer.pack(item)
        future = TaskFuture(self._dispatcher, next(self._numbers), lease)
        self._dispatcher.submit(future, SINGLE | flag, payload)
        return future

    def map(
        self, items: Iterable[Any], *, ordered: bool = True, chunksize: int | Literal["auto"] = "auto"
    ) -> Generator[Any, None, None]:
        """Yield the results of `fn(item, **shared)` for every item.

        The map takes items while results are consumed, and only a few ahead. So the iterator may be endless, and a slow
        consumer slows the workers down. The call itself takes the first items.

        Args:
            items: any iterable; it is read on the thread that consumes the results.
            ordered: True for results in the order of the items, False for results as they come.
            chunksize: number of items that a worker takes at once. "auto" starts with one and grows to about a
                millisecond of work. If a worker dies, its whole chunk fails.

        Returns:
            A generator of results. An exception of a task is raised in place of its result, and ends the map. An error
            of `items` is raised after the results of the items before it. When the generator ends, is closed or is
            dropped, items that no worker has begun are taken back.

        Raises:
            InvalidInputError, InvalidTypeError: an argument is invalid.
            PoolError: the pool is shut down or broken, or another process made it.

        Example:
            >>> import tundish as td
            >>> with td.shm.SharedPool(abs, max_workers=2) as pool:
            ...     list(pool.map(range(-3, 1)))
            [3, 2, 1, 0]
        """
        self._dispatcher.check_open()
        if chunksize != "auto":
            chunksize = checked_count(chunksize, "chunksize", minimum=1)
        try:
            iterator = iter(items)
        except TypeError as error:
            raise InvalidTypeError(
                f"items is {format_type(items)}, which cannot be iterated over: give a list or another iterable"
            ) from error
        size = None if chunksize == "auto" else int(chunksize)
        mapping = ParallelMap(
            self._dispatcher,
            self._packer,
            iterator,
            FlowControl(self._workers, size),
            is_ordered=ordered,
            is_chunked=size != 1,
            pool=self,
        )
        results = mapping.results()
        next(results)
        return results

    def shutdown(
        self, wait: bool = True, cancel: bool = False, timeout: float | None = STUCK_TIMEOUT_SECONDS
    ) -> None:
        """Refuse new tasks, finish the submitted ones, and end the workers. Further calls do nothing.

        A call in a done-callback does not wait. A call in a child of the process that made the pool does nothing.

        Args:
            wait: True to return when all workers have ended, False to return at once.
            cancel: whether to cancel tasks that no worker has begun.
            timeout: seconds without a finished task after which the workers are killed; None for no limit. Then the
                futures of running tasks raise `WorkerDiedError`, and those of waiting tasks `PoolError`.

        Raises:
            InvalidInputError, InvalidTypeError: `timeout` is invalid.

        Example:
            >>> import tundish as td
            >>> pool = td.shm.SharedPool(abs, max_workers=1)
            >>> result = pool.submit(-3)
            >>> pool.shutdown()
            >>> result.result()
            3
        """
        stuck_timeout = None if timeout is None else check_seconds(timeout)
        if os.getpid() != self._dispatcher.pid:
            return
        self._dispatcher.close(cancel=cancel, stuck_timeout=stuck_timeout)
        if wait:
            self._supervisor.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Shut down after all tasks. After an exception cancel waiting tasks; after Ctrl-C kill the workers."""
        if os.getpid() != self._dispatcher.pid:
            return
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._supervisor.end()
        elif error is not None:
            self.shutdown(cancel=True)
        else:
            self.shutdown(timeout=None)
