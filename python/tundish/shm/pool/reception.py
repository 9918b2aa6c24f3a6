"""Where a pool's parent hears its workers and receives what they send in shared memory.

Owns the parent's end of the line on which workers speak. What always holds: the memory that a worker's results lie in
was announced, with its descriptor, before the first result in it was finished; so a result that is on the board can
be opened though its worker is dead, if what was announced is taken in first.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final

from tundish import _native
from tundish.errors import OutOfMemoryError, StorageError
from tundish.shm.pool.ends import Line
from tundish.shm.pool.messages import Arrival, Courier, loads
from tundish.shm.pool.worker import MEMORY, Saying, hear

__all__ = ["Reception"]

# Results in memory that their workers shared, which take a descriptor and two mappings each. Whoever keeps more of
# them has the others in memory of the process's own, and the shared memory is used again at once.
_MOST_HELD: Final = 128


class Reception:
    """The parent's side of `voice`; parcels are opened by `courier`."""

    def __init__(self, voice: Line, courier: Courier) -> None:
        self._voice = voice
        self._courier = courier
        self._lock = threading.Lock()
        self._sayings: list[Saying] = []
        self._opened: dict[int, list[_native.ReceivedBuffer]] = {}

    def fileno(self) -> int:
        """What becomes readable when a worker speaks."""
        return self._voice.parent.fileno()

    def sayings(self) -> list[Saying]:
        """What workers said since the last call."""
        self._take_in()
        with self._lock:
            sayings, self._sayings = self._sayings, []
        return sayings

    def open(self, ticket: int, payload: bytes) -> Arrival:
        """The parcel that the payload of an answer refers to; the same one until it is handed over."""
        views = self._opened.setdefault(ticket, [])
        reference, table_bytes = loads(payload)
        try:
            self._open(reference, views)
        except OSError:
            # Its worker died; what it announced may not have been taken in yet.
            self._take_in()
            self._open(reference, views)
        arrival = Arrival(memoryview(views[0]), table_bytes)
        return arrival.copied() if self._courier.parcels.views > _MOST_HELD else arrival

    def hand_over(self, ticket: int) -> None:
        """Whoever waited for the parcel has it."""
        self._opened.pop(ticket, None)

    def _open(self, reference: Any, views: list[_native.ReceivedBuffer]) -> None:
        if not views:
            # In one step as far as Ctrl-C sees: a parcel can be opened once.
            views.extend(map(self._courier.parcels.open, (reference,)))

    def forget(self, pid: int) -> None:
        """Let go of the memory of a dead worker, after its last results were opened."""
        self._courier.parcels.forget(pid)

    def close(self) -> None:
        self._voice.close()

    def disown(self) -> None:
        """Let go of the memory that was kept for messages, in a child which would keep it alive."""
        self._lock = threading.Lock()
        self._opened.clear()
        self._courier.disown()

    def _take_in(self) -> None:
        with self._lock:
            while (saying := hear(self._voice.parent)) is not None:
                if saying.what == MEMORY:
                    for descriptor in saying.descriptors:
                        # No descriptor or memory left: what comes in it is looked for at its worker, or is an error.
                        with contextlib.suppress(StorageError, OutOfMemoryError):
                            self._courier.parcels.adopt(descriptor, saying.pid)
                else:
                    self._sayings.append(saying)
