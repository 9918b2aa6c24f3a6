"""How many items go to a worker at once, and how far a map runs ahead of who consumes it.

Owns both numbers of one map and what they are learned from. What always holds: no more than `MOST_PIECES` pieces are
out or wait to be consumed, and no more than `AHEAD_BYTES` of results where they are large, but always enough that
every worker has one; a chunk that was made longer stays below a slot's room by what was learned of its items.
"""

from __future__ import annotations

import time
from typing import Final

__all__ = ["Pace"]

# Work in one chunk: so long that handing it over costs nothing beside it, so short that workers end together.
_CHUNK_SECONDS: Final = 1e-3
# Chunks that have to be left for every worker, where the number of items is known.
_CHUNKS_LEFT: Final = 4
_GROWTH: Final = 4
# What workers need so that they do not run dry while the consumer is busy elsewhere.
_AHEAD_SECONDS: Final = 0.03
_AHEAD_BYTES: Final = 256 << 20
# Of a slot's room, since items differ in size.
_FILLING: Final = 0.75
_SETTLING_SECONDS: Final = 1e-3


class Pace:
    """Of one map.

    Args:
        workers: of the pool.
        room: bytes of a slot.
        chunksize: items a piece; None: as is learned.
        items: how many there are, where that is known.
        most_pieces: that may be ahead.
    """

    def __init__(
        self, workers: int, room: int, chunksize: int | None, items: int | None, most_pieces: int
    ) -> None:
        self._workers = workers
        self._room = room
        self._learns = chunksize is None
        self._size = chunksize or 1
        self._left = items
        self._least = 4 * workers
        self._most = max(most_pieces, self._least) if chunksize == 1 else 8 * workers
        self._rate_since = time.perf_counter()
        self._rate_pieces = 0
        self.window = self._least

    def next_size(self) -> int:
        """Items of the next piece."""
        if not self._learns or self._left is None:
            return self._size
        return max(1, min(self._size, self._left // (self._workers * _CHUNKS_LEFT)))

    def handed_out(self, items: int) -> None:
        if self._left is not None:
            self._left = max(0, self._left - items)

    def learn(self, items: int, seconds: float, most_bytes: int) -> None:
        """A chunk of so many items took a worker so long, and the longer of its two messages so many bytes."""
        if not self._learns or items == 0:
            return
        by_time = int(_CHUNK_SECONDS * items / max(seconds, 1e-9))
        by_room = int(_FILLING * self._room * items / max(most_bytes, 1))
        self._size = max(1, min(by_time, by_room, self._size * _GROWTH))

    def consumed(self, pieces: int, large_bytes: int) -> None:
        """So many pieces were consumed, with so many bytes in parcels: look how far ahead the map may run."""
        self._rate_pieces += pieces
        now = time.perf_counter()
        passed = now - self._rate_since
        if passed < _SETTLING_SECONDS:
            return
        window = min(self._most, max(self._least, int(_AHEAD_SECONDS * self._rate_pieces / passed)))
        if large_bytes:
            window = min(window, max(self._workers + 1, _AHEAD_BYTES * pieces // large_bytes))
        self.window = window
        self._rate_since, self._rate_pieces = now, 0
