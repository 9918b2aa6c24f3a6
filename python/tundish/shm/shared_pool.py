"""`SharedPool`: a pool of processes that is bound to one function and its shared arguments.

`ParallelMap` is one call of its `map`, which sends items as tasks while results are consumed.

Invariants of a map:

- At most `FlowControl.window` tasks are ahead of the consumer. The map takes items from their iterator for these only.
- If the map ends early, it takes back the tasks that no worker has begun.
- An error of the iterator is raised after the results of the items before it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import multiprocessing
import operator
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any, Final, Literal, Self

from tundish import _native
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    NotPicklableError,
    PoolError,
    TundishError,
    WorkerDiedError,
    format_count,
    format_integer,
    format_type,
)
from tundish.progress import ProgressLine
from tundish.shm import messages
from tundish.shm.dispatcher import Dispatcher, TaskFuture
from tundish.shm.messages import (
    CHUNK,
    GO_ON,
    IN_BUFFER,
    MAX_PAYLOAD_BYTES,
    PARENT_ERROR,
    SINGLE,
    SLOT_BYTES,
    SLOTS,
    MessagePacker,
    WorkerMessages,
)
from tundish.shm.supervisor import STUCK_TIMEOUT_SECONDS, ForkServer, SpawnedWorkers, Supervisor
from tundish.shm.worker import ParentLink, SendableFunction, bind_inherited, serve
from tundish.timeouts import check_seconds


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
        self._name = str(getattr(fn, "__qualname__", type(fn).__qualname__))
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
        self,
        items: Iterable[Any],
        *,
        ordered: bool = True,
        chunksize: int | Literal["auto"] = "auto",
        progress: bool | None = None,
        return_exceptions: bool = False,
    ) -> Generator[Any, None, None]:
        """Yield the results of `fn(item, **shared)` for every item.

        The map takes items while results are consumed, and only a few ahead. So the iterator may be endless, and a slow
        consumer slows the workers down. The call itself takes the first items.

        Args:
            items: any iterable; it is read on the thread that consumes the results.
            ordered: True for results in the order of the items, False for results as they come.
            chunksize: number of items that a worker takes at once. "auto" starts with one and grows to about a
                millisecond of work. If a worker dies, its whole chunk fails.
            progress: whether to count the results on a line of standard error; None if that is a terminal and the map
                takes more than half a second.
            return_exceptions: whether to yield the exception of an item in place of its result, and go on. If a worker
                dies, each item of its chunk yields the `WorkerDiedError`; with `chunksize=1` only the one item.

        Returns:
            A generator of results. An exception of a task is raised in place of its result, and ends the map, unless
            `return_exceptions`. An error of `items` is raised after the results of the items before it. When the
            generator ends, is closed or is dropped, items that no worker has begun are taken back.

        Raises:
            InvalidInputError, InvalidTypeError: an argument is invalid.
            PoolError: the pool is shut down or broken, or another process made it. It always ends the map.

        Example:
            >>> import tundish as td
            >>> with td.shm.SharedPool(abs, max_workers=2) as pool:
            ...     list(pool.map(range(-3, 1)))
            ...     list(pool.map([-3, "three"], return_exceptions=True))
            [3, 2, 1, 0]
            [3, TypeError("bad operand type for abs(): 'str'")]
        """
        self._dispatcher.check_open()
        delay = _PROGRESS_DELAY_SECONDS if progress is None else 0.0
        line = ProgressLine("map", progress, unit="items", delay=delay)
        total = _length_of(items) if line.shown else 0
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
            returns_exceptions=return_exceptions,
            pool=self,
        )
        results = mapping.results()
        next(results)
        return _counted(results, line, self._name, total) if line.shown else results

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

    def __repr__(self) -> str:
        state = "" if self._dispatcher.is_open else ", shut down"
        return f"<SharedPool of {self._name}, {format_count(self._workers, 'worker')}{state}>"

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


MAIN_GUARD: Final = (
    'Under spawn and forkserver workers import the main module: make pools under `if __name__ == "__main__":`, and '
    "read what the workers wrote to stderr"
)
# The task queue has room for so many.
_MAX_WORKERS: Final = 512


def checked_shared(fn: Callable[..., Any], shared: Mapping[str, Any] | None) -> dict[str, Any]:
    if not callable(fn):
        raise InvalidTypeError(f"fn is {format_type(fn)}: give a function")
    if shared is not None and not isinstance(shared, Mapping):
        raise InvalidTypeError(f"shared is {format_type(shared)}: give a dict of argument names and values")
    checked = dict(shared or {})
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


def checked_count(value: Any, name: str, *, minimum: int) -> int:
    try:
        count = operator.index(value)
    except TypeError as error:
        raise InvalidTypeError(f"{name} is {value!r}: give an integer of at least {minimum}") from error
    if count < minimum:
        raise InvalidInputError(f"{name} is {format_integer(count)}: give at least {minimum}")
    return count


def checked_workers(value: int | None) -> int:
    if value is None:
        return _native.available_processors()
    count = checked_count(value, "max_workers", minimum=1)
    if count > _MAX_WORKERS:
        raise InvalidInputError(f"max_workers is {format_integer(count)}: give at most {_MAX_WORKERS}")
    return count


def checked_context(value: str | BaseContext | None) -> BaseContext:
    try:
        context = value if isinstance(value, BaseContext) else multiprocessing.get_context(value or "fork")
    except ValueError as error:
        raise InvalidInputError(
            f"mp_context is {value!r}: give fork, forkserver, spawn, or such a context of multiprocessing"
        ) from error
    process = multiprocessing.current_process()
    if process.daemon:
        raise PoolError(
            f"process {process.name!r} is a daemon of multiprocessing, which may have no children: make the pool in "
            "another process"
        )
    if context.get_start_method() != "fork" and getattr(process, "_inheriting", False):
        raise PoolError(f"a pool is made while this process, a worker itself, is being started. {MAIN_GUARD}")
    return context


# Short maps draw no line unless they are asked to.
_PROGRESS_DELAY_SECONDS: Final = 0.5


def _length_of(items: Iterable[Any]) -> int:
    """Return the number of items, or 0 if it is unknown."""
    try:
        return operator.length_hint(items)
    except Exception:  # noqa: BLE001 (code of users, whose answer is for the progress line alone)
        return 0


def _counted(
    results: Generator[Any, None, None], line: ProgressLine, name: str, total: int
) -> Generator[Any, None, None]:
    """Yield `results`, and count them on `line`."""
    with line, contextlib.closing(results):
        line.update(name, 0, total)
        for done, result in enumerate(results, 1):
            line.update(name, done, total)
            yield result


# An item of a slow iterator waits at most this long for the next ones.
_GATHERING_SECONDS: Final = 2e-3
_RETRY_SECONDS: Final = 1e-3

# Work in one chunk: long beside the cost of sending it, and short enough that all workers end at about the same time.
_CHUNK_SECONDS: Final = 1e-3
_GROWTH: Final = 4
# Tasks of one map that are on the queue or not consumed yet; the other slots are left to other callers.
_MAX_AHEAD: Final = 384
# Work that keeps the workers busy while the consumer does something else.
_AHEAD_SECONDS: Final = 0.03
_AHEAD_BYTES: Final = 256 << 20
# Share of a message's room that a chunk fills, since items differ in size.
_FILLING: Final = 0.75
_SETTLING_SECONDS: Final = 1e-3


class FlowControl:
    """Adapts two numbers while a map runs: the items in a task, and the tasks that may be ahead of the consumer.

    `chunksize` is the number of items in a task; None to adapt it.
    """

    def __init__(self, workers: int, chunksize: int | None) -> None:
        self._workers = workers
        self._learns = chunksize is None
        self._min_window = 4 * workers
        self._max_window = max(_MAX_AHEAD, self._min_window) if chunksize == 1 else 8 * workers
        self._measured_at = time.perf_counter()
        self._tasks = 0
        self.size = chunksize or 1
        self.window = self._min_window

    def learn(self, items: int, seconds: float, most_bytes: int) -> None:
        """Adapt `size` to a finished chunk: its time in the worker, and the bytes of the longer of its two messages."""
        if self._learns and items:
            by_time = int(_CHUNK_SECONDS * items / max(seconds, 1e-9))
            by_room = int(_FILLING * MAX_PAYLOAD_BYTES * items / max(most_bytes, 1))
            self.size = max(1, min(by_time, by_room, self.size * _GROWTH))

    def consumed(self, tasks: int, large_bytes: int) -> None:
        """Adapt `window` to the rate at which tasks are consumed, and to their bytes in shared memory."""
        self._tasks += tasks
        now = time.perf_counter()
        passed = now - self._measured_at
        if passed < _SETTLING_SECONDS:
            return
        self.window = min(self._max_window, max(self._min_window, int(_AHEAD_SECONDS * self._tasks / passed)))
        if large_bytes:
            self.window = min(self.window, max(self._workers + 1, _AHEAD_BYTES * tasks // large_bytes))
        self._measured_at, self._tasks = now, 0


class ParallelMap:
    """One call of `map`. Its tasks are single items, or lists of them if `is_chunked`; it keeps `pool` alive.

    If it `returns_exceptions`, it yields the exceptions of items; otherwise the first one ends it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        packer: MessagePacker,
        items: Iterator[Any],
        flow: FlowControl,
        *,
        is_ordered: bool,
        is_chunked: bool,
        returns_exceptions: bool,
        pool: object,
    ) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._packer = packer
        self._flow = flow
        self._is_ordered = is_ordered
        self._is_chunked = is_chunked
        self._returns_exceptions = returns_exceptions
        self._tasks = _chunks(items, flow) if is_chunked else items
        self._is_exhausted = False
        self._failure: Exception | None = None
        self._answers: dict[int, tuple[int, Any]] = {}
        # How many tasks were put on the queue, and how many of them were consumed. Tasks are numbered as they are put.
        self._put = 0
        self._consumed = 0
        # Packed, but not on the queue yet.
        self._payloads: list[Any] = []
        # By the number of a task whose payload refers to a buffer; kept until its answer comes.
        self._leases: dict[int, _native.SentBuffer] = {}
        # By the number of a task that cannot be sent. Its payload is not put on the queue.
        self._refused: dict[int, Exception] = {}
        self._items_taken = 0
        # By the number of a chunk: its first item, number of items, and bytes sent.
        self._spans: dict[int, tuple[int, int, int]] = {}

    def deliver(self, number: int, kind: int, payload: Any) -> None:
        self._leases.pop(number, None)
        self._answers[number] = kind, payload

    def describe(self, number: int) -> str:
        first, count, _ = self._spans.get(number, (number, 1, 0))
        if count == 1:
            return f"item {first} of a map"
        return f"the chunk of items {first} to {first + count - 1} of a map"

    def results(self) -> Generator[Any, None, None]:
        """Yield None once the first tasks are sent, then the results."""
        try:
            has_more = self._fill()
            yield None
            while not self._is_exhausted or self._put != self._consumed or self._payloads:
                if not self._is_ready():
                    self._wait(has_more)
                yield from self._ready()
                has_more = self._fill()
            if self._failure is not None:
                raise self._failure
        finally:
            if self._put != self._consumed:
                self._dispatcher.abandon(self)

    def _is_ready(self) -> bool:
        answers = self._answers
        return self._consumed in answers if self._is_ordered else bool(answers)

    def _wait(self, has_more: bool) -> None:
        if has_more:
            # The iterator is slow: collect results between its items.
            self._dispatcher.collect()
            return
        if self._put != self._consumed:
            self._dispatcher.collect_until(self._is_ready, None)
        if not self._is_ready():
            # Another thread collects, or the queue is full of other tasks.
            time.sleep(_RETRY_SECONDS)
            self._dispatcher.collect()

    def _ready(self) -> Generator[Any, None, None]:
        """Yield the results that have come, in order if the map is ordered."""
        answers = self._answers
        tasks = large_bytes = 0
        numbers: Iterable[int] = itertools.count(self._consumed) if self._is_ordered else list(answers)
        for number in numbers:
            answer = answers.pop(number, None)
            if answer is None:
                break
            kind, payload = answer
            self._consumed += 1
            tasks += 1
            if kind == SINGLE and type(payload) is not bytes:
                yield payload
                continue
            value, error = messages.unpack(kind, payload)
            size = payload.nbytes if kind & IN_BUFFER else 0 if kind == PARENT_ERROR else len(payload)
            # Only the value may keep the buffer alive.
            del answer, payload
            if kind & IN_BUFFER:
                large_bytes += size
            if error is not None:
                if not self._returns_exceptions or is_end_of_pool(kind, error):
                    raise error
                count = self._spans.pop(number)[1] if self._is_chunked else 1
                yield from itertools.repeat(error, count)
            elif self._is_chunked:
                yield from self._of_chunk(number, value, size)
            else:
                yield value
            del value
        self._flow.consumed(tasks, large_bytes)

    def _of_chunk(
        self, number: int, value: tuple[float, list[Any], dict[int, Any]], size: int
    ) -> Iterator[Any]:
        seconds, results, failures = value
        _, count, sent = self._spans.pop(number)
        self._flow.learn(count, seconds, max(sent, size))
        for place, packed_error in failures.items():
            results[place] = messages.unpack_error(packed_error)
            if not self._returns_exceptions:
                yield from results[:place]
                raise results[place]
        yield from results

    # ---- Sending items ----

    def _fill(self) -> bool:
        """Send tasks up to the window. Returns True if the time for packing ran out first."""
        missing = self._flow.window - (self._put - self._consumed)
        if missing * 4 < self._flow.window and self._put != self._consumed:
            # Wait until a larger batch can be sent at once.
            return False
        is_in_time = True
        if not self._is_exhausted:
            try:
                is_in_time = self._gather(missing - len(self._payloads))
            except Exception as error:  # noqa: BLE001 (raised after the results before it)
                self._failure = error
                self._is_exhausted = True
        self._put_all()
        return not is_in_time and not self._payloads

    def _gather(self, asked: int) -> bool:
        """Pack up to `asked` tasks. Returns False if the time ran out first."""
        until = time.perf_counter() + _GATHERING_SECONDS
        payloads, is_plain = self._payloads, _native.is_plain
        for task in itertools.islice(self._tasks, max(0, asked)):
            asked -= 1
            if is_plain(task, MAX_PAYLOAD_BYTES):
                payloads.append(task)
            elif self._is_chunked:
                self._pack_chunk(task)
            else:
                self._pack_item(task)
            if time.perf_counter() > until:
                return False
        self._is_exhausted = asked > 0
        return True

    def _pack_item(self, item: Any) -> None:
        try:
            self._pack(item)
        except NotPicklableError as error:
            self._refuse(error)

    def _pack_chunk(self, items: list[Any]) -> None:
        sent = 0
        try:
            sent = self._pack(items)
        except NotPicklableError as error:
            if len(items) > 1:
                # One by one, so that only the one that cannot be sent has no result.
                for item in items:
                    self._pack_chunk([item])
                return
            self._refuse(error)
        self._spans[self._put + len(self._payloads) - 1] = self._items_taken, len(items), sent
        self._items_taken += len(items)

    def _pack(self, task: Any) -> int:
        """Pack a task into a payload. Returns the bytes of its message, above the maximum if it needs a buffer."""
        flag, payload, lease = self._packer.pack(task)
        if lease is not None:
            self._leases[self._put + len(self._payloads)] = lease
        self._payloads.append(payload)
        return len(payload) if not flag else MAX_PAYLOAD_BYTES + 1

    def _refuse(self, error: NotPicklableError) -> None:
        """Take the error of a task that cannot be sent as its answer, or raise it."""
        if not self._returns_exceptions:
            raise error
        self._refused[self._put + len(self._payloads)] = error
        self._payloads.append(None)

    def _put_all(self) -> None:
        kind = SINGLE
        if self._is_chunked:
            kind = CHUNK | GO_ON if self._returns_exceptions else CHUNK
        while self._payloads:
            refusal = self._refused.pop(self._put, None)
            if refusal is not None:
                self._answers[self._put] = PARENT_ERROR, refusal
                self._put += 1
                del self._payloads[0]
                continue
            # A task with a buffer has another kind; while there are such tasks, tasks are put one by one.
            wanted = 1 if self._leases or self._refused else len(self._payloads)
            flag = IN_BUFFER if self._put in self._leases else 0
            placed = self._dispatcher.put_many(self, self._put, kind | flag, self._payloads[:wanted])
            self._put += placed
            del self._payloads[:placed]
            if placed < wanted:
                return


def is_end_of_pool(kind: int, error: BaseException) -> bool:
    """Return whether an answer says that the pool has ended, and nothing of its task."""
    return kind == PARENT_ERROR and isinstance(error, PoolError) and not isinstance(error, WorkerDiedError)


def _chunks(items: Iterator[Any], flow: FlowControl) -> Iterator[list[Any]]:
    failure = None
    while failure is None:
        chunk: list[Any] = []
        size = flow.size
        try:
            chunk.extend(itertools.islice(items, size))
        except Exception as error:  # noqa: BLE001 (raised after the items before it)
            failure = error
        if chunk:
            yield chunk
        if failure is None and len(chunk) < size:
            return
    raise failure
