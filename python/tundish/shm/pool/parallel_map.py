"""`SharedPool.map`: sends items in pieces as results are consumed, and yields the results.

Invariants:

- No more pieces are ahead of the consumer than `Pacing.window`; items are taken from their iterator only for these.
- Whatever ends the map early takes back the pieces that no worker has begun.
- An error of the items themselves is raised behind the results of those before it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Final

from tundish import _native
from tundish.errors import NotPicklableError
from tundish.shm.pool import messages
from tundish.shm.pool.dispatcher import Dispatcher
from tundish.shm.pool.messages import CHUNK, IN_BUFFER, ITEM, LOST, ROOM, VALUE, MessagePacker

__all__ = ["Pacing", "ParallelMap"]

# Items of a slow iterator do not wait for each other longer than this.
_GATHERING_SECONDS: Final = 2e-3
_RETRY_SECONDS: Final = 1e-3
_LOOK_AGAIN_SECONDS: Final = 0.5

# Work in one chunk: so long that sending it costs nothing beside it, so short that workers end together.
_CHUNK_SECONDS: Final = 1e-3
# Chunks that have to be left for every worker, where the number of items is known.
_CHUNKS_LEFT: Final = 4
_GROWTH: Final = 4
# Pieces of one map that are on the queue or not consumed yet; the rest of the slots is left to others.
_MOST_AHEAD: Final = 384
# Work that keeps workers busy while the consumer is busy elsewhere.
_AHEAD_SECONDS: Final = 0.03
_AHEAD_BYTES: Final = 256 << 20
# Of a message's room, since items differ in size.
_FILLING: Final = 0.75
_SETTLING_SECONDS: Final = 1e-3


class Pacing:
    """How many items go into a piece, and how many pieces may be ahead of the consumer; learned while the map runs.

    Args:
        workers: processes of the pool.
        chunksize: items a piece; None: as is learned.
        items: how many there are, where that is known.
    """

    def __init__(self, workers: int, chunksize: int | None, items: int | None) -> None:
        self._workers = workers
        self._learns = chunksize is None
        self._size = chunksize or 1
        self._left = items
        self._least = 4 * workers
        self._most = max(_MOST_AHEAD, self._least) if chunksize == 1 else 8 * workers
        self._measured_at = time.perf_counter()
        self._pieces = 0
        #: Pieces that may be on the queue or not consumed yet.
        self.window = self._least

    def next_size(self) -> int:
        """Return the items of the next piece."""
        if not self._learns or self._left is None:
            return self._size
        return max(1, min(self._size, self._left // (self._workers * _CHUNKS_LEFT)))

    def sent(self, items: int) -> None:
        """So many items were sent."""
        if self._left is not None:
            self._left = max(0, self._left - items)

    def learn(self, items: int, seconds: float, most_bytes: int) -> None:
        """Learn from a chunk: the worker's time for it, and the bytes of the longer of its two messages."""
        if not self._learns or items == 0:
            return
        by_time = int(_CHUNK_SECONDS * items / max(seconds, 1e-9))
        by_room = int(_FILLING * ROOM * items / max(most_bytes, 1))
        self._size = max(1, min(by_time, by_room, self._size * _GROWTH))

    def consumed(self, pieces: int, large_bytes: int) -> None:
        """Learn from the rate at which pieces are consumed, with so many bytes in shared memory."""
        self._pieces += pieces
        now = time.perf_counter()
        passed = now - self._measured_at
        if passed < _SETTLING_SECONDS:
            return
        window = min(self._most, max(self._least, int(_AHEAD_SECONDS * self._pieces / passed)))
        if large_bytes:
            window = min(window, max(self._workers + 1, _AHEAD_BYTES * pieces // large_bytes))
        self.window = window
        self._measured_at, self._pieces = now, 0


class ParallelMap:
    """One call of `map`.

    Args:
        dispatcher: the pool's tasks.
        packer: packs items.
        items: the items.
        pacing: of this map.
        is_ordered: results come in the order of the items.
        is_chunked: pieces are lists of items.
        pool: kept alive as long as the map.
    """

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
        self._items = items
        self._pacing = pacing
        self._is_ordered = is_ordered
        self._is_chunked = is_chunked
        self._is_exhausted = False
        self._failure: Exception | None = None
        self._answers: dict[int, tuple[int, Any]] = {}
        # Made where the consumer waits while another thread collects.
        self._arrived: threading.Event | None = None
        # Pieces are numbered as they are sent; of those before the first number, `_consumed` were consumed.
        self._put = 0
        self._consumed = 0
        # Packed, but not on the queue yet; buffers by their pieces' numbers.
        self._payloads: list[Any] = []
        self._buffers: dict[int, _native.SendBuffer] = {}
        self._items_taken = 0
        # Of chunks: first item, items, bytes sent.
        self._spans: dict[int, tuple[int, int, int]] = {}

    def deliver(self, number: int, kind: int, payload: Any) -> None:
        """See `Receiver`."""
        self._answers[number] = kind, payload
        arrived = self._arrived
        if arrived is not None:
            arrived.set()

    def describe(self, number: int) -> str:
        """See `Receiver`."""
        first, count, _ = self._spans.get(number, (number, 1, 0))
        if count == 1:
            return f"item {first} of a map"
        return f"the chunk of items {first} to {first + count - 1} of a map"

    def results(self) -> Generator[Any, None, None]:
        """Yield None once the first pieces are sent, then the results."""
        try:
            has_more = self._fill()
            yield None
            while not self._is_over():
                if not self._is_ready():
                    self._wait(has_more)
                yield from self._ready()
                has_more = self._fill()
            if self._failure is not None:
                raise self._failure
        finally:
            if self._put != self._consumed:
                self._dispatcher.abandon(self)
            for buffer in self._buffers.values():
                buffer.revoke()

    def _is_ready(self) -> bool:
        answers = self._answers
        return self._consumed in answers if self._is_ordered else bool(answers)

    def _is_over(self) -> bool:
        return self._is_exhausted and self._put == self._consumed and not self._payloads

    def _wait(self, has_more: bool) -> None:
        if has_more:
            # Items come slowly; the results that have come meanwhile are looked at between them.
            self._dispatcher.collect()
        elif self._put == self._consumed:
            # The queue is full of other tasks.
            time.sleep(_RETRY_SECONDS)
            self._dispatcher.collect()
        else:
            self._dispatcher.collect_until(self._is_ready, None)
            self._arrived = threading.Event()
            while not self._is_ready():
                # Another thread collects.
                self._arrived.wait(_LOOK_AGAIN_SECONDS)
                self._arrived.clear()
                self._dispatcher.check_same_process()
            self._arrived = None

    def _ready(self) -> Generator[Any, None, None]:
        """The results that are there, in order where that is asked for."""
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
            if kind == VALUE and type(payload) is not bytes:
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
        until = time.perf_counter() + _GATHERING_SECONDS
        gather = self._gather_chunks if self._is_chunked else self._gather_items
        try:
            is_in_time = self._is_exhausted or gather(missing, until)
        except Exception as error:  # noqa: BLE001 (an error of the items is raised in its turn)
            self._failure = error
            self._is_exhausted = is_in_time = True
        self._put_all()
        return not is_in_time and not self._payloads

    def _gather_items(self, missing: int, until: float) -> bool:
        payloads, is_plain = self._payloads, _native.is_plain
        asked = missing - len(payloads)
        for item in itertools.islice(self._items, max(0, asked)):
            asked -= 1
            if is_plain(item, ROOM):
                payloads.append(item)
            else:
                self._pack(item)
            if time.perf_counter() > until:
                return False
        self._is_exhausted = asked > 0
        return True

    def _gather_chunks(self, missing: int, until: float) -> bool:
        while len(self._payloads) < missing:
            size = self._pacing.next_size()
            items: list[Any] = []
            try:
                items.extend(itertools.islice(self._items, size))
                self._is_exhausted = len(items) < size
            finally:
                # Also the items that came before an error of the iterator.
                self._pack_chunk(items)
            if self._is_exhausted:
                return True
            if time.perf_counter() > until:
                return False
        return True

    def _pack_chunk(self, items: list[Any]) -> None:
        if not items:
            return
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
        self._pacing.sent(len(items))

    def _pack(self, content: Any) -> int:
        """Make a piece of `content`; the bytes that its message has to have room for."""
        flag, payload, buffer = self._packer.pack(content)
        if buffer is not None:
            self._buffers[self._put + len(self._payloads)] = buffer
        self._payloads.append(payload)
        return len(payload) if not flag else ROOM + 1

    def _put_all(self) -> None:
        kind = CHUNK if self._is_chunked else ITEM
        while self._payloads:
            buffer = self._buffers.get(self._put) if self._buffers else None
            if buffer is not None:
                is_put = self._dispatcher.put(self, self._put, kind | IN_BUFFER, self._payloads[0], buffer)
                if is_put:
                    del self._buffers[self._put]
                placed, wanted = int(is_put), 1
            else:
                wanted = min(self._buffers, default=self._put + len(self._payloads)) - self._put
                placed = self._dispatcher.put_many(self, self._put, kind, self._payloads[:wanted])
            self._put += placed
            del self._payloads[:placed]
            if placed < wanted:
                return
