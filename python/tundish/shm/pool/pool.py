"""`SharedPool`: a function and its shared arguments, bound once to processes that run it.

Owns what belongs to one pool and ends it: the board, the lines, the engine of its tasks, the supervisor of its workers.
What always holds: arguments are checked before a process is started; when a pool is over, by whatever way, no process,
descriptor or segment of it is left; only the process that made a pool uses it.
"""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import operator
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable
from collections.abc import Mapping as MappingType
from multiprocessing import util
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Final, Literal, Self

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, PoolError, shown
from tundish.shm.pool.binding import Placed, inherited
from tundish.shm.pool.ends import Line
from tundish.shm.pool.engine import Engine
from tundish.shm.pool.futures import TaskFuture
from tundish.shm.pool.mapping import Mapping
from tundish.shm.pool.messages import ITEM, Courier
from tundish.shm.pool.pace import Pace
from tundish.shm.pool.reception import Reception
from tundish.shm.pool.started import StartedWorkers
from tundish.shm.pool.supervisor import Supervisor
from tundish.shm.pool.worker import Link, serve
from tundish.shm.pool.workforce import Workforce
from tundish.shm.pool.zygote import Zygote

__all__ = ["SharedPool"]

# 512 slots of 16 KiB: room for the messages of many workers, and warm in the processor's cache where few are used.
_SLOTS: Final = 512
_SLOT_BYTES: Final = 16 * 1024
_ROOM: Final = _SLOT_BYTES - 64
# Pieces of one map that are on the board or not yet consumed; the rest of the slots is left to others.
_MOST_AHEAD: Final = 384
_PATIENCE_SECONDS: Final = 30.0
# As many as a board has room for.
_MOST_WORKERS: Final = 512

_MAIN_GUARD = (
    'Under spawn and forkserver workers import the main module: make pools under `if __name__ == "__main__":`, and '
    "read what the workers wrote to stderr"
)


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
        shared = _checked_shared(fn, shared)
        self._workers = _checked_workers(max_workers)
        if max_restarts is not None:
            max_restarts = _checked_count(max_restarts, "max_restarts", least=0)
        context = _checked_context(mp_context)
        self._numbers = itertools.count()
        self._courier = Courier(_ROOM)
        self._life = _Life(fn, shared, context, self._courier, self._workers, max_restarts)
        self._engine = self._life.engine
        weakref.finalize(self, self._engine.drop).atexit = False

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
            chunksize = _checked_count(chunksize, "chunksize", least=1)
        try:
            iterator = iter(items)
        except TypeError as error:
            raise InvalidTypeError(
                f"items are a {type(items).__name__}, which cannot be iterated over"
            ) from error
        size = None if chunksize == "auto" else int(chunksize)
        pace = Pace(self._workers, _ROOM, size, _length(items), _MOST_AHEAD)
        mapping = Mapping(
            self._engine, self._courier, iterator, pace, is_ordered=ordered, is_chunked=size != 1, keeps=self
        )
        results = mapping.results()
        next(results)
        return results

    def shutdown(
        self, wait: bool = True, cancel: bool = False, timeout: float | None = _PATIENCE_SECONDS
    ) -> None:
        """Take no more tasks, finish those there are, and end the workers. A second call changes nothing.

        Args:
            wait: return when all workers have ended. Else this happens in the background.
            cancel: cancel tasks that no worker has begun.
            timeout: seconds without any task finishing after which what still runs is taken for stuck and ended by
                force; its futures raise `WorkerDiedError`, those of tasks that were never begun `PoolError`. None: as
                long as it takes.

        Called by a done-callback it does not wait. In a child process of the one that made the pool it does nothing.
        """
        patience = None if timeout is None else _checked_seconds(timeout)
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

    def _check_process(self) -> None:
        if os.getpid() != self._engine.pid:
            raise PoolError(
                f"this pool belongs to process {self._engine.pid}, which made it, and this is process {os.getpid()}: "
                "make a pool here"
            )


class _Life:
    """What a pool consists of, and its end, which the pool itself need not live to see."""

    def __init__(
        self,
        function: Callable[..., Any],
        shared: MappingType[str, Any],
        context: BaseContext,
        courier: Courier,
        workers: int,
        max_restarts: int | None,
    ) -> None:
        board = _native.TaskBoard(_SLOTS, _SLOT_BYTES)
        lifeline, voice = Line(), Line()
        is_forked = context.get_start_method() == "fork"
        try:
            workforce = _workforce(function, shared, context, board, lifeline, voice)
        except BaseException:
            lifeline.close()
            voice.close()
            raise
        reception = Reception(voice, courier)
        self.supervisor = Supervisor(
            board,
            reception,
            lifeline,
            workforce,
            workers=workers,
            max_restarts=max_restarts,
            is_staged=not is_forked,
            hint="" if is_forked else _MAIN_GUARD,
        )
        self.engine = Engine(board, reception, self._over)
        # Before multiprocessing looks for children that are left, at the end of the interpreter or of a worker.
        self._at_exit = util.Finalize(None, self._exit, exitpriority=100)
        self.engine.start()
        self.supervisor.start(self.engine)

    def join(self) -> None:
        try:
            self.engine.join()
        except BaseException:
            # Ctrl-C: whoever waits no longer wants the rest of it.
            self.end()
            raise

    def end(self) -> None:
        """By force and at once."""
        self.engine.close(cancel=True, patience=0, is_forced=True)
        self.supervisor.hurry()
        self.engine.join()

    def _over(self, is_forced: bool) -> None:
        self.supervisor.end(is_forced)
        self._at_exit.cancel()

    def _exit(self) -> None:
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            self.end()
        else:
            self.engine.close(cancel=False, patience=_PATIENCE_SECONDS)
            self.join()


def _workforce(
    function: Callable[..., Any],
    shared: MappingType[str, Any],
    context: BaseContext,
    board: _native.TaskBoard,
    lifeline: Line,
    voice: Line,
) -> Workforce:
    numbers = {
        "board": board.fd,
        "lifeline": lifeline.child.fileno(),
        "voice": voice.child.fileno(),
        "room": _ROOM,
    }
    if context.get_start_method() != "fork":
        return StartedWorkers(context, Placed(function, shared), **numbers)
    parent = os.getpid()

    def work(worker: int) -> None:
        serve(Link(worker=worker, parent=parent, **numbers), lambda: inherited(function, shared))

    return Zygote(work)


# ---- Arguments ----


def _checked_shared(fn: Callable[..., Any], shared: MappingType[str, Any] | None) -> dict[str, Any]:
    if not callable(fn):
        raise InvalidTypeError(f"fn is a {type(fn).__name__}, which cannot be called")
    if shared is not None and not isinstance(shared, MappingType):
        raise InvalidTypeError(f"shared is a {type(shared).__name__}; it maps names of arguments to values")
    checked = dict(shared or {})
    for name in checked:
        if not isinstance(name, str):
            raise InvalidTypeError(f"shared has the key {name!r}; its keys are names of arguments")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return checked
    try:
        signature.bind(None, **checked)
    except TypeError as error:
        raise InvalidTypeError(
            f"{getattr(fn, '__qualname__', fn)!s}{signature} cannot be called as fn(item, **shared): {error}"
        ) from None
    return checked


def _checked_count(value: Any, name: str, *, least: int) -> int:
    if isinstance(value, bool):
        raise InvalidTypeError(f"{name} is {value}; it is a number")
    try:
        count = operator.index(value)
    except TypeError as error:
        raise InvalidTypeError(f"{name} is {value!r}; it is a number of at least {least}") from error
    if count < least:
        raise InvalidInputError(f"{name} is {shown(count)}; it is at least {least}")
    return count


def _checked_workers(value: int | None) -> int:
    if value is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = _checked_count(value, "max_workers", least=1)
    if count > _MOST_WORKERS:
        raise InvalidInputError(f"max_workers is {shown(count)}; a pool has at most {_MOST_WORKERS}")
    return count


def _checked_seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"timeout is {value!r}; it is a number of seconds, or None") from error
    if not seconds >= 0:
        raise InvalidInputError(f"timeout is {seconds}; it is a number of seconds from 0 on, or None")
    return seconds


def _checked_context(value: str | BaseContext | None) -> BaseContext:
    methods = multiprocessing.get_all_start_methods()
    if value is None:
        context: BaseContext = multiprocessing.get_context("fork" if "fork" in methods else None)
    elif isinstance(value, str):
        if value not in methods:
            raise InvalidInputError(f"mp_context is {value!r}; this system has {', '.join(methods)}")
        context = multiprocessing.get_context(value)
    elif isinstance(value, BaseContext):
        context = value
    else:
        raise InvalidTypeError(
            f"mp_context is a {type(value).__name__}; it is the name of a start method or what "
            "multiprocessing.get_context gives"
        )
    process = multiprocessing.current_process()
    if process.daemon:
        raise PoolError(
            f"process {process.name!r} is a daemon of multiprocessing, which may have no children"
        )
    if context.get_start_method() != "fork" and getattr(process, "_inheriting", False):
        raise PoolError(
            f"a pool is made while this process, a worker itself, is being started. {_MAIN_GUARD}"
        )
    return context


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, OverflowError):
        return None
