"""Decides votes in shared memory, in microseconds, while all ranks are on one node and report success.

Every other vote is held in the job's store, which finds and names the rank that failed, was killed or is late. All
ranks learn from the memory that they have to go there. A vote takes 0.1 ms here instead of 1 ms in the store, and a
lazy save of two ranks half the time.

Invariants:

1. A rank that holds a vote in the store first gives it up here. Otherwise the others would wait for it here.
2. When `decide` returns or raises, the vote is decided or given up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from tundish._native import SharedVotes
from tundish.errors import TundishError

__all__ = ["SharedMemoryVotes"]

# The others wait so long for a late rank before they go to the store. After such a wait its cost is small.
_MAX_WAIT_SECONDS = 0.1
# The pause between two checks for signals.
_SIGNAL_CHECK_SECONDS = 0.02
# No node has more ranks.
_MAX_RANKS = 512
_NOTHING_TO_COMPARE = bytes(32)


class SharedMemoryVotes:
    """The shared memory in which a group of `size` ranks decides votes; this rank is number `index` of them."""

    def __init__(self, index: int, size: int) -> None:
        self._index = index
        self._size = size
        self._offered: SharedVotes | None = None
        self._memory: SharedVotes | None = None

    def offer(self) -> tuple[int, int, int] | None:
        """Create the memory; returns its address for the other ranks, None where there can be none."""
        if self._size > _MAX_RANKS:
            return None
        try:
            self._offered = SharedVotes(self._size)
        except (TundishError, OSError):
            return None
        return self._offered.address

    def join(self, address: Sequence[int] | None) -> None:
        """Use the memory at `address`. If one rank cannot reach it, no rank uses it."""
        try:
            if self._offered is not None:
                self._memory = self._offered
            elif address is not None:
                process, descriptor, identity = address
                self._memory = SharedVotes.open((process, descriptor, identity), self._size)
        except (TundishError, OSError):
            return
        if self._memory is not None:
            self._memory.join(self._index)

    def release(self) -> None:
        """Use no shared memory: the ranks are not all on one node, or the voter closes."""
        self._offered = self._memory = None

    def decide(self, number: int, *, is_plain: bool, same: str | None, seconds: float | None) -> bool:
        """Whether vote `number` succeeded here; if not, it has to be held in the store.

        Args:
            number: of the vote.
            is_plain: this rank is well and brings nothing that only the store can carry.
            same: the text that must be equal on all ranks.
            seconds: until the vote's deadline.
        """
        memory, succeeded = self._memory, False
        if memory is None:
            return False
        try:
            if is_plain and memory.have_all_joined:
                decided = memory.cast(self._index, number, _digest(same))
                wait = _MAX_WAIT_SECONDS if seconds is None else min(seconds, _MAX_WAIT_SECONDS)
                until = time.monotonic() + wait
                while decided is None and (left := until - time.monotonic()) > 0:
                    decided = memory.wait(number, min(_SIGNAL_CHECK_SECONDS, left))
        finally:
            succeeded = memory.give_up(number)
        return succeeded

    def give_up(self, number: int) -> bool:
        """Send vote `number` to the store unless it was decided here; returns whether it succeeded here."""
        return self._memory is not None and self._memory.give_up(number)


def _digest(same: str | None) -> bytes:
    if same is None:
        return _NOTHING_TO_COMPARE
    return hashlib.sha256(same.encode(errors="surrogatepass")).digest()
