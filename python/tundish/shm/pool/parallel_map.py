"""`SharedPool.map`: sends items as tasks while results are consumed, and yields the results.

Invariants:

- At most `FlowControl.window` tasks are ahead of the consumer. The map takes items from their iterator for these only.
- If the map ends early, it takes back the tasks that no worker has begun.
- An error of the iterator is raised after the results of the items before it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Final

from tundish import _native
from tundish.errors import NotPicklableError
from tundish.shm.pool import messages
from tundish.shm.pool.dispatcher import Dispatcher
from tundish.shm.pool.messages import CHUNK, IN_BUFFER, MAX_PAYLOAD_BYTES, PARENT_ERROR, SINGLE, MessagePacker

__all__ = ["FlowControl", "ParallelMap"]

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
    """One call of `map`. Its tasks are single items, or lists of them if `is_chunked`; it keeps `pool` alive."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        packer: MessagePacker,
        items: Iterator[Any],
        flow: FlowControl,
        *,
        is_ordered: bool,
        is_chunked: bool,
        pool: object,
    ) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._packer = packer
        self._flow = flow
        self._is_ordered = is_ordered
        self._is_chunked = is_chunked
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
                raise error
            if self._is_chunked:
                yield from self._of_chunk(number, value, size)
            else:
                yield value
            del value
        self._flow.consumed(tasks, large_bytes)

    def _of_chunk(self, number: int, value: tuple[float, list[Any], Any], size: int) -> Iterator[Any]:
        seconds, results, packed_error = value
        _, count, sent = self._spans.pop(number)
        self._flow.learn(count, seconds, max(sent, size))
        yield from results
        if packed_error is not None:
            raise messages.unpack_error(packed_error)

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
                self._pack(task)
            if time.perf_counter() > until:
                return False
        self._is_exhausted = asked > 0
        return True

    def _pack_chunk(self, items: list[Any]) -> None:
        try:
            sent = self._pack(items)
        except NotPicklableError:
            if len(items) > 1:
                # One by one, so that the items before the one that cannot be sent have results.
                for item in items:
                    self._pack_chunk([item])
            raise
        self._spans[self._put + len(self._payloads) - 1] = self._items_taken, len(items), sent
        self._items_taken += len(items)

    def _pack(self, task: Any) -> int:
        """Pack a task into a payload. Returns the bytes of its message, above the maximum if it needs a buffer."""
        flag, payload, lease = self._packer.pack(task)
        if lease is not None:
            self._leases[self._put + len(self._payloads)] = lease
        self._payloads.append(payload)
        return len(payload) if not flag else MAX_PAYLOAD_BYTES + 1

    def _put_all(self) -> None:
        kind = CHUNK if self._is_chunked else SINGLE
        while self._payloads:
            # A task with a buffer has another kind; while there are such tasks, tasks are put one by one.
            wanted = 1 if self._leases else len(self._payloads)
            flag = IN_BUFFER if self._put in self._leases else 0
            placed = self._dispatcher.put_many(self, self._put, kind | flag, self._payloads[:wanted])
            self._put += placed
            del self._payloads[:placed]
            if placed < wanted:
                return


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
