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
from tundish.shm.pool.worker import WorkerLink, serve

__all__ = ["SharedPool"]


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
    The pool is broken when a worker dies three times in a row before it can work.
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
            link = WorkerLink(queue=queue.fd, control=control.workers_end, parent=os.getpid())
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
                queue,
                self._dispatcher,
                control,
                workers,
                count=self._workers,
                hint=hint,
            )
            undo.pop_all()
        weakref.finalize(self, self._dispatcher.drop).atexit = False
        self._supervisor.start()

    def submit(self, item: Any) -> TaskFuture:
        """Have `fn(item, **shared)` run in a worker.

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
        """The results of `fn(item, **shared)` for every item.

        Items are taken from `items` as results are consumed, never far ahead, so that endless iterators are as good
        as lists and a slow consumer holds the workers up. The first ones are taken by this call.

        Args:
            items: any iterable; it is read on the thread that consumes the results.
            ordered: results in the order of the items; else as they come.
            chunksize: items a worker gets at once. "auto" begins with one and grows to about a millisecond of work, or
                what fits a message. A worker that dies fails the chunk it has.

        Returns:
            A generator. An exception of a task is raised where its result would be, and ends the map, as an error of
            `items` does behind the results before it. What ends the map, or closing or dropping it, takes back what
            is not begun.

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
        """Shut down: after all tasks; after an exception without those that were not begun; after Ctrl-C at once."""
        if os.getpid() != self._dispatcher.pid:
            return
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._supervisor.end()
        elif error is not None:
            self.shutdown(cancel=True)
        else:
            self.shutdown(timeout=None)
