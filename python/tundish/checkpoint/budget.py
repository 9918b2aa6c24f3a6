"""Host memory for staging, counted in bytes and bounded.

What always holds: saves together hold no more than the limit, unless one save alone is larger; that one has
the budget for itself.
"""

from __future__ import annotations

import logging
import threading
import time

from tundish.errors import InvalidInputError
from tundish.waiting import wait_for

__all__ = ["StagingBudget"]

_logger = logging.getLogger("tundish.checkpoint")


class StagingBudget:
    """At most `limit` bytes at a time; None does not bound them."""

    def __init__(self, limit: int | None) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidInputError(f"staging_limit_bytes is {limit!r}: give a number of bytes, or None")
        self.limit = limit
        self._in_use = 0
        self._peak = 0
        self._freed = threading.Condition()

    def take(self, count: int, what: str) -> None:
        """Take `count` bytes for `what`; waits until earlier saves gave back enough, and says so."""
        with self._freed:
            if not self._fits(count):
                started = time.monotonic()
                _logger.warning(
                    "%s waits for the save before it: it stages %d bytes, and %d of staging_limit_bytes=%s are in use",
                    what,
                    count,
                    self._in_use,
                    self.limit,
                )
                wait_for(lambda pause: self._freed.wait_for(lambda: self._fits(count), pause))
                _logger.warning("%s waited %.3f s", what, time.monotonic() - started)
            self._in_use += count
            self._peak = max(self._peak, self._in_use)

    def give_back(self, count: int) -> None:
        """Give `count` bytes back."""
        with self._freed:
            self._in_use -= count
            self._freed.notify_all()

    def stats(self) -> dict[str, int | None]:
        """Bytes in use, the most there ever were, the limit."""
        with self._freed:
            return {"in_use": self._in_use, "peak": self._peak, "limit": self.limit}

    def _fits(self, count: int) -> bool:
        return self.limit is None or self._in_use == 0 or self._in_use + count <= self.limit
