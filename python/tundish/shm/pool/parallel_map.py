"""`SharedPool.map`: sends items in pieces as results are consumed, and yields the results.

Invariants:

- No more pieces are ahead of the consumer than `Pacing.window`; items are taken from their iterator only for these.
- If the map ends early, it takes back the pieces that no worker has begun.
- An error of the items themselves is raised behind the results of those before it.
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
from tundish.shm.pool.messages import CHUNK, IN_BUFFER, LOST, ROOM, SINGLE, MessagePacker

__all__ = ["Pacing", "ParallelMap"]

# Items of a slow iterator do not wait for each other longer than this.
_GATHERING_SECONDS: Final = 2e-3
_RETRY_SECONDS: Final = 1e-3

# Work in one chunk: so long that sending it costs nothing beside it, so short that workers end together.
_CHUNK_SECONDS: Final = 1e-3
_GROWTH: Final = 4
# Pieces of one map that are on the queue or not consumed yet; the rest of the slots is left to others.
_MOST_AHEAD: Final = 384
# Work that keeps workers busy while the consumer is busy elsewhere.
_AHEAD_SECONDS: Final = 0.03
_AHEAD_BYTES: Final = 256 << 20
# Share of a message's room that a chunk fills, since items differ in size.
_FILLING: Final = 0.75
_SETTLING_SECONDS: Final = 1e-3


class Pacing:
    """Learns while a map runs how many items go into a piece, and how many pieces may be ahead of the consumer.

    `chunksize` is the number of items a piece; None if it is to be learned.
    """

    def __init__(self, workers: int, chunksize: int | None) -> None:
        self._workers = workers
        self._learns = chunksize is None
        self._least = 4 * workers
        self._most = max(_MOST_AHEAD, self._least) if chunksize == 1 else 8 * workers
        self._measured_at = time.perf_counter()
        self._pieces = 0
        self.size = chunksize or 1
        self.window = self._least

    def learn(self, items: int, seconds: float, most_bytes: int) -> None:
        """Learn from a chunk: the worker's time for it, and the bytes of the longer of its two messages."""
        if self._learns and items:
            by_time = int(_CHUNK_SECONDS * items / max(seconds, 1e-9))
            by_room = int(_FILLING * ROOM * items / max(most_bytes, 1))
            self.size = max(1, min(by_time, by_room, self.size * _GROWTH))

    def consumed(self, pieces: int, large_bytes: int) -> None:
        """Learn from the rate at which pieces are consumed, with so many bytes in shared memory."""
        self._pieces += pieces
        now = time.perf_counter()
        passed = now - self._measured_at
        if passed < _SETTLING_SECONDS:
            return
        self.window = min(self._most, max(self._least, int(_AHEAD_SECONDS * self._pieces / passed)))
        if large_bytes:
            self.window = min(self.window, max(self._workers + 1, _AHEAD_BYTES * pieces // large_bytes))
        self._measured_at, self._pieces = now, 0


class ParallelMap:
    """One call of `map`. Its pieces are single items, or lists of them if `is_chunked`; it keeps `pool` alive."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        packer: MessagePacker,
        items: Iterator[Any],
        pacing: Pacing,
        *,
        is_ordered: bool,
        is_chunked: bool,
        pool: object,
    ) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._packer = packer
        self._pacing = pacing
        self._is_ordered = is_ordered
        self._is_chunked = is_chunked
        self._pieces = _chunks(items, pacing) if is_chunked else items
        self._is_exhausted = False
        self._failure: Exception | None = None
        self._answers: dict[int, tuple[int, Any]] = {}
        # Pieces are numbered as they are sent; of those before the first number, `_consumed` were consumed.
        self._put = 0
        self._consumed = 0
        # Packed, but not on the queue yet.
        self._payloads: list[Any] = []
        # By the number of a piece whose payload refers to a buffer; kept until its answer comes.
        self._leases: dict[int, _native.BufferLease] = {}
        self._items_taken = 0
        # Of chunks: first item, items, bytes sent.
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
        """Yield None once the first pieces are sent, then the results."""
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
            # Items come slowly; the results that have come meanwhile are looked at between them.
            self._dispatcher.collect()
            return
        if self._put != self._consumed:
            self._dispatcher.collect_until(self._is_ready, None)
        if not self._is_ready():
            # Another thread collects, or the queue is full of other tasks.
            time.sleep(_RETRY_SECONDS)
            self._dispatcher.collect()

    def _ready(self) -> Generator[Any, None, None]:
        """The results that are there, in order if that is asked for."""
        answers = self._answers
        pieces = large_bytes = 0
        numbers: Iterable[int] = itertools.count(self._consumed) if self._is_ordered else list(answers)
        for number in numbers:
            answer = answers.pop(number, None)
            if answer is None:
                break
            kind, payload = answer
            self._consumed += 1
            pieces += 1
            if kind == SINGLE and type(payload) is not bytes:
                yield payload
                continue
            value, error = messages.unpack(kind, payload)
            size = payload.nbytes if kind & IN_BUFFER else 0 if kind == LOST else len(payload)
            # The value alone may keep the buffer.
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
        self._pacing.consumed(pieces, large_bytes)

    def _of_chunk(self, number: int, value: tuple[float, list[Any], Any], size: int) -> Iterator[Any]:
        seconds, results, packed_error = value
        _, count, sent = self._spans.pop(number)
        self._pacing.learn(count, seconds, max(sent, size))
        yield from results
        if packed_error is not None:
            raise messages.unpack_error(packed_error)

    # ---- Items are sent ----

    def _fill(self) -> bool:
        """Send as many pieces as may be ahead; whether only the time did not allow for all of them."""
        missing = self._pacing.window - (self._put - self._consumed)
        if missing * 4 < self._pacing.window and self._put != self._consumed:
            # Few at a time cost more than they gain.
            return False
        is_in_time = True
        if not self._is_exhausted:
            try:
                is_in_time = self._gather(missing - len(self._payloads))
            except Exception as error:  # noqa: BLE001 (an error of the items is raised in its turn)
                self._failure = error
                self._is_exhausted = True
        self._put_all()
        return not is_in_time and not self._payloads

    def _gather(self, asked: int) -> bool:
        """Pack up to `asked` pieces; whether the time allowed for all of them."""
        until = time.perf_counter() + _GATHERING_SECONDS
        payloads, is_plain = self._payloads, _native.is_plain
        for piece in itertools.islice(self._pieces, max(0, asked)):
            asked -= 1
            if is_plain(piece, ROOM):
                payloads.append(piece)
            elif self._is_chunked:
                self._pack_chunk(piece)
            else:
                self._pack(piece)
            if time.perf_counter() > until:
                return False
        self._is_exhausted = asked > 0
        return True

    def _pack_chunk(self, items: list[Any]) -> None:
        try:
            sent = self._pack(items)
        except NotPicklableError:
            if len(items) > 1:
                # Those before the one that cannot be sent have results; that one raises by itself.
                for item in items:
                    self._pack_chunk([item])
            raise
        self._spans[self._put + len(self._payloads) - 1] = self._items_taken, len(items), sent
        self._items_taken += len(items)

    def _pack(self, piece: Any) -> int:
        """Make a payload of `piece`; the bytes that its message has to have room for."""
        flag, payload, lease = self._packer.pack(piece)
        if lease is not None:
            self._leases[self._put + len(self._payloads)] = lease
        self._payloads.append(payload)
        return len(payload) if not flag else ROOM + 1

    def _put_all(self) -> None:
        kind = CHUNK if self._is_chunked else SINGLE
        while self._payloads:
            # Pieces with a buffer are of another kind; while there are any, pieces are put one by one.
            wanted = 1 if self._leases else len(self._payloads)
            flag = IN_BUFFER if self._put in self._leases else 0
            placed = self._dispatcher.put_many(self, self._put, kind | flag, self._payloads[:wanted])
            self._put += placed
            del self._payloads[:placed]
            if placed < wanted:
                return


def _chunks(items: Iterator[Any], pacing: Pacing) -> Iterator[list[Any]]:
    failure = None
    while failure is None:
        chunk: list[Any] = []
        size = pacing.size
        try:
            chunk.extend(itertools.islice(items, size))
        except Exception as error:  # noqa: BLE001 (raised behind the items before it)
            failure = error
        if chunk:
            yield chunk
        if failure is None and len(chunk) < size:
            return
    raise failure
