"""`SharedPool`: a pool of processes that is bound to one function and its shared arguments."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Literal, Self

from tundish import _native
from tundish.errors import InvalidTypeError, PoolError, TundishError
from tundish.shm.pool.arguments import (
    MAIN_GUARD,
    checked_context,
    checked_count,
    checked_seconds,
    checked_shared,
    checked_workers,
)
from tundish.shm.pool.bound_function import PlacedFunction, bind_inherited
from tundish.shm.pool.control_socket import ControlSocket
from tundish.shm.pool.dispatcher import Dispatcher, TaskFuture
from tundish.shm.pool.fork_server import ForkServer
from tundish.shm.pool.messages import SINGLE, SLOT_BYTES, SLOTS, MessagePacker
from tundish.shm.pool.parallel_map import Pacing, ParallelMap
from tundish.shm.pool.processes import SpawnedWorkers
from tundish.shm.pool.supervisor import STUCK_TIMEOUT_SECONDS, Supervisor
from tundish.shm.pool.worker import ParentLink, serve

__all__ = ["SharedPool"]


class SharedPool:
    """A pool of processes bound to one function and its shared arguments.

    A task is one call `fn(item, **shared)` in a worker. The shared arguments are bound once. Numpy arrays and CPU
    tensors among them exist once in memory, for any number of workers; arrays are read-only. Other values are pickled
    once a worker. Large arrays in results and items travel through shared memory.

        >>> import numpy as np
        >>> import tundish as td
        >>> def total(start, numbers):
        ...     return int(numbers[start : start + 3].sum())
        >>> with td.shm.SharedPool(total, {"numbers": np.arange(12)}, max_workers=2) as pool:
        ...     list(pool.map([0, 3, 6, 9]))
        [3, 12, 21, 30]

    Under fork the workers come from one process that is forked when the pool is made. They see `fn` and `shared` as
    they are at that moment, without a copy. The process that makes the pool is not forked again, so its later threads
    do no harm.

    If a worker dies, the task that it was running raises `WorkerDiedError` and is not tried again. Another worker takes
    its place. The pool is broken when a worker dies three times in a row before it can work. When the process that made
    the pool ends, even by SIGKILL, the workers end within a second. Ctrl-C reaches this process alone; leaving the
    `with` block by it ends the workers at once.

    Many threads may use a pool at once, several pools may run side by side, and a task may use a pool of its own. A
    pool belongs to the process that made it.

    Args:
        fn: called in workers as `fn(item, **shared)`. Under spawn and forkserver it has to be importable.
        shared: shared arguments by name. Arrays keep their dtype and order.
        max_workers: number of processes; None for the number of processors that this process may use.
        mp_context: "fork" (the default), "forkserver", "spawn", or such a context of `multiprocessing`.

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
            control = ControlSocket(self._packer)
            undo.callback(control.close)
            link = ParentLink(queue=queue.fd, control=control.workers_end, parent=os.getpid())
            workers: SpawnedWorkers | ForkServer
            if context.get_start_method() == "fork":
                workers = ForkServer(lambda worker: serve(link, worker, lambda: bind_inherited(fn, shared)))
                hint = ""
            else:
                workers = SpawnedWorkers(context, PlacedFunction(fn, shared), link)
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

        Tasks that find no room on the queue wait in this process, without a limit; `map` is for endless streams.

        Returns:
            A `concurrent.futures.Future`. `cancel()` succeeds until a worker takes the task.

        Raises:
            NotPicklableError: the item cannot be sent.
            PoolError: the pool is shut down or broken, or another process made it.
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

        The map takes items as results are consumed, never far ahead: iterators may be endless, and a slow consumer
        holds the workers up. This call takes the first items.

        Args:
            items: any iterable; it is read on the thread that consumes the results.
            ordered: whether results come in the order of the items, or as they are ready.
            chunksize: number of items that a worker gets at once. "auto" begins with one and grows to about a
                millisecond of work, or a full message. A worker that dies fails its chunk.

        Returns:
            A generator. An exception of a task is raised in place of its result, and ends the map. An error of `items`
            is raised behind the results of the items before it. When the map ends, is closed or dropped, items that no
            worker has begun are taken back.

        Raises:
            InvalidInputError, InvalidTypeError: an argument cannot be used.
            PoolError: the pool is shut down or broken, or another process made it.
        """
        self._dispatcher.check_open()
        if chunksize != "auto":
            chunksize = checked_count(chunksize, "chunksize", least=1)
        try:
            iterator = iter(items)
        except TypeError as error:
            raise InvalidTypeError(
                f"items are a {type(items).__name__}, which cannot be iterated over"
            ) from error
        size = None if chunksize == "auto" else int(chunksize)
        mapping = ParallelMap(
            self._dispatcher,
            self._packer,
            iterator,
            Pacing(self._workers, size),
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
        """Take no more tasks, finish the submitted ones, and end the workers. A second call changes nothing.

        A call in a done-callback does not wait. In a child process of the one that made the pool it does nothing.

        Args:
            wait: whether to return when all workers have ended, or at once.
            cancel: whether to cancel tasks that no worker has begun.
            timeout: seconds without a finished task after which the workers are killed. The futures of running tasks
                then raise `WorkerDiedError`, those of tasks that were never begun `PoolError`. None: no limit.
        """
        stuck_timeout = None if timeout is None else checked_seconds(timeout)
        if os.getpid() != self._dispatcher.pid:
            return
        self._dispatcher.close(cancel=cancel, stuck_timeout=stuck_timeout)
        if wait:
            self._supervisor.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down after all tasks; after an exception, cancel those that are not begun; after Ctrl-C, at once."""
        if os.getpid() != self._dispatcher.pid:
            return
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._supervisor.end()
        elif error is not None:
            self.shutdown(cancel=True)
        else:
            self.shutdown(timeout=None)
