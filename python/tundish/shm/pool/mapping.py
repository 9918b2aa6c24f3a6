"""`SharedPool.map`: items go out in pieces as results come back, in bounded numbers.

Owns the pieces of one map: those that are out and the answers that were not consumed yet. No future is made for an
item. What always holds:

1. No more pieces are ahead of the consumer than `Pace` allows; items are taken from their iterator only for these.
2. Whatever ends the map early (an error of a task or of the items, a generator that is closed or dropped) takes back
   what no worker has begun.
3. An error of the items themselves is raised behind the results of those before it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from tundish import _native
from tundish.errors import NotPicklableError
from tundish.shm.pool import messages
from tundish.shm.pool.engine import Engine
from tundish.shm.pool.messages import CHUNK, IN_PARCEL, ITEM, LOST, VALUE, Courier
from tundish.shm.pool.pace import Pace
from tundish.waiting import Moment

__all__ = ["Mapping"]

# Items are gathered this long at most before they go out: those of a slow iterator do not wait for each other.
_GATHERING_SECONDS = 2e-3
_RETRY_SECONDS = 1e-3
_END = object()


class Mapping:
    """One call of `map`."""

    def __init__(
        self,
        engine: Engine,
        courier: Courier,
        items: Iterator[Any],
        pace: Pace,
        *,
        is_ordered: bool,
        is_chunked: bool,
        keeps: object,
    ) -> None:
        # A pool lives as long as a map of it, though nobody else keeps it.
        self._pool = keeps
        self._engine = engine
        self._courier = courier
        self._items = items
        self._pace = pace
        self._is_ordered = is_ordered
        self._is_chunked = is_chunked
        self._is_exhausted = False
        self._failure: Exception | None = None
        self._answers: dict[int, tuple[int, Any]] = {}
        # Of whoever is parked.
        self._bell: Moment | None = None
        # Pieces are numbered as they go out; of those before the first number, `_consumed` were consumed.
        self._put = 0
        self._consumed = 0
        # Packed, but not on the board yet; parcels by their pieces' numbers.
        self._payloads: list[Any] = []
        self._parcels: dict[int, _native.SendBuffer] = {}
        self._items_taken = 0
        # Of chunks: first item, items, bytes sent.
        self._spans: dict[int, tuple[int, int, int]] = {}

    # ---- What the engine calls ----

    def arrive(self, number: int, kind: int, payload: Any) -> None:
        self._answers[number] = kind, payload
        bell = self._bell
        if bell is not None:
            bell.come()

    def is_ready(self) -> bool:
        answers = self._answers
        return self._consumed in answers if self._is_ordered else bool(answers)

    def park(self, seconds: float) -> None:
        self._bell = bell = Moment()
        try:
            if not self.is_ready():
                bell.wait(seconds)
        finally:
            self._bell = None

    def describe(self, number: int) -> str:
        first, count, _ = self._spans.get(number, (number, 1, 0))
        if count == 1:
            return f"item {first} of a map"
        return f"the chunk of items {first} to {first + count - 1} of a map"

    # ---- What the consumer runs ----

    def results(self) -> Generator[Any, None, None]:
        """The results; what comes first is none but says that the first pieces are on their way."""
        try:
            has_more = self._fill()
            yield None
            while not self._is_over():
                if not self.is_ready():
                    self._wait(has_more)
                yield from self._ready()
                has_more = self._fill()
            if self._failure is not None:
                raise self._failure
        finally:
            if self._put != self._consumed:
                self._engine.abandon(self)
            for parcel in self._parcels.values():
                parcel.revoke()

    def _is_over(self) -> bool:
        return self._is_exhausted and self._put == self._consumed and not self._payloads

    def _wait(self, has_more: bool) -> None:
        if has_more:
            # Items come slowly; what has come back meanwhile is looked at between them.
            self._engine.collect()
        elif self._put != self._consumed:
            self._engine.attend(self)
        else:
            # The board is full of the tasks of others.
            self.park(_RETRY_SECONDS)

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
            size = payload.nbytes if kind & IN_PARCEL else 0 if kind == LOST else len(payload)
            # The value alone may keep the parcel.
            del answer, payload
            if kind & IN_PARCEL:
                large_bytes += size
            if error is not None:
                raise error
            if self._is_chunked:
                yield from self._of_chunk(number, value, size)
            else:
                yield value
            del value
        self._pace.consumed(pieces, large_bytes)

    def _of_chunk(self, number: int, value: tuple[float, list[Any], Any], size: int) -> Iterator[Any]:
        seconds, results, packed_error = value
        _, count, sent = self._spans.pop(number)
        self._pace.learn(count, seconds, max(sent, size))
        yield from results
        if packed_error is not None:
            raise messages.unpack_error(packed_error)

    # ---- Items go out ----

    def _fill(self) -> bool:
        """Send as many pieces as may be ahead; whether it was time alone that did not allow for all of them."""
        missing = self._pace.window - (self._put - self._consumed)
        if missing * 4 < self._pace.window and self._put != self._consumed:
            # Little by little costs more than it gains.
            return False
        until = time.perf_counter() + _GATHERING_SECONDS
        gather = self._gather_chunks if self._is_chunked else self._gather_items
        try:
            is_in_time = self._is_exhausted or gather(missing, until)
        except Exception as error:  # noqa: BLE001 (whatever the items raise is raised in its turn)
            self._fail(error)
            is_in_time = True
        self._put_all()
        return not is_in_time and not self._payloads

    def _gather_items(self, missing: int, until: float) -> bool:
        payloads, room, is_plain = self._payloads, self._courier.room, _native.is_plain
        asked = missing - len(payloads)
        for item in itertools.islice(self._items, max(0, asked)):
            asked -= 1
            if is_plain(item, room):
                payloads.append(item)
            else:
                self._pack(item)
            if time.perf_counter() > until:
                return False
        self._is_exhausted = asked > 0
        return True

    def _gather_chunks(self, missing: int, until: float) -> bool:
        while len(self._payloads) < missing:
            size = self._pace.next_size()
            items: list[Any] = []
            try:
                items.extend(itertools.islice(self._items, size))
                self._is_exhausted = len(items) < size
            finally:
                # Also what the iterator gave before it failed.
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
                # Those before the one that it is are to have results; it raises by itself.
                for item in items:
                    self._pack_chunk([item])
            raise
        self._spans[self._put + len(self._payloads) - 1] = self._items_taken, len(items), sent
        self._items_taken += len(items)
        self._pace.handed_out(len(items))

    def _pack(self, content: Any) -> int:
        """Make a piece of `content`; how many bytes a slot had to have for it."""
        flag, payload, parcel = self._courier.pack(content)
        if parcel is not None:
            self._parcels[self._put + len(self._payloads)] = parcel
        self._payloads.append(payload)
        return len(payload) if not flag else self._courier.room + 1

    def _put_all(self) -> None:
        kind = CHUNK if self._is_chunked else ITEM
        while self._payloads:
            parcel = self._parcels.get(self._put) if self._parcels else None
            if parcel is not None:
                is_put = self._engine.put(self, self._put, kind | IN_PARCEL, self._payloads[0], parcel)
                if is_put:
                    del self._parcels[self._put]
                placed, wanted = int(is_put), 1
            else:
                wanted = min(self._parcels, default=self._put + len(self._payloads)) - self._put
                placed = self._engine.put_many(self, self._put, kind, self._payloads[:wanted])
            self._put += placed
            del self._payloads[:placed]
            if placed < wanted:
                return

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._is_exhausted = True
