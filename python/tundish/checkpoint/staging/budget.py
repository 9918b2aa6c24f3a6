"""Host memory for staging, counted in bytes and bounded.

What always holds: saves together hold no more than the limit, unless one save alone is larger; that one has
the budget for itself.
"""

from __future__ import annotations

import logging
import time

from tundish.errors import InvalidInputError
from tundish.waiting import Changes

__all__ = ["Claim", "StagingBudget"]

_logger = logging.getLogger("tundish.checkpoint")


class StagingBudget:
    """At most `limit` bytes at a time; None does not bound them."""

    def __init__(self, limit: int | None) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidInputError(f"staging_limit_bytes is {limit!r}: give a number of bytes, or None")
        self.limit = limit
        self._in_use = 0
        self._peak = 0
        self._changes = Changes()

    def claim(self) -> Claim:
        """What a save will hold of the budget: nothing yet."""
        return Claim(self)

    def stats(self) -> dict[str, int | None]:
        """Bytes in use, the most there ever were, the limit."""
        with self._changes.lock:
            return {"in_use": self._in_use, "peak": self._peak, "limit": self.limit}

    def _fits(self, count: int) -> bool:
        return self.limit is None or self._in_use == 0 or self._in_use + count <= self.limit


class Claim:
    """What one save holds of a budget; whoever has it can give it back wherever Ctrl-C came."""

    def __init__(self, budget: StagingBudget) -> None:
        self._budget = budget
        self._held = 0

    def take(self, count: int, what: str, *, waits: bool = True) -> bool:
        """Take `count` bytes for `what`; waits until earlier saves gave back enough, and says so.

        Returns whether it took them: always, unless it is not to wait.
        """
        budget = self._budget
        if budget._changes.wait_until(lambda: self._has_taken(count), 0.0):
            return True
        if not waits:
            return False
        started = time.monotonic()
        _logger.warning(
            "%s waits for the save before it: it stages %d bytes, and %d of staging_limit_bytes=%s are in use",
            what,
            count,
            budget._in_use,
            budget.limit,
        )
        budget._changes.wait_until(lambda: self._has_taken(count))
        _logger.warning("%s waited %.3f s", what, time.monotonic() - started)
        return True

    def give_back(self) -> None:
        """Give back what it holds. Does nothing the second time."""
        with self._budget._changes.lock:
            # In steps between which no signal comes.
            held, self._held = self._held, 0
            self._budget._in_use -= held
            self._budget._changes.tell()

    def _has_taken(self, count: int) -> bool:
        budget = self._budget
        if not budget._fits(count):
            return False
        # As above.
        budget._in_use += count
        self._held = count
        budget._peak = max(budget._peak, budget._in_use)
        return True
