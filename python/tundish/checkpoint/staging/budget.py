"""Bounds the host memory that saves are staged in, in bytes."""

from __future__ import annotations

import logging
import threading
import time

from tundish.errors import InvalidInputError

__all__ = ["Claim", "StagingBudget"]

_logger = logging.getLogger("tundish.checkpoint")


class StagingBudget:
    """Bytes that all saves of a rank may stage together.

    Args:
        limit: the most bytes; None sets no limit.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidInputError(f"staging_limit_bytes is {limit!r}: give a number of bytes, or None")
        self.limit = limit
        self._in_use = 0
        self._peak = 0
        self._changed = threading.Condition()

    def claim(self) -> Claim:
        """An empty claim, for one save."""
        return Claim(self)

    def stats(self) -> dict[str, int | None]:
        """Bytes in use, the most there ever were, and the limit."""
        with self._changed:
            return {"in_use": self._in_use, "peak": self._peak, "limit": self.limit}


class Claim:
    """The bytes that one save holds of a budget."""

    def __init__(self, budget: StagingBudget) -> None:
        self._budget = budget
        self._held = 0

    def take(self, count: int, what: str, *, waits: bool = True) -> bool:
        """Take bytes for a save.

        Args:
            count: how many bytes.
            what: the save, for messages.
            waits: whether to wait until earlier saves give back enough, with a warning in the log.

        Returns:
            Whether the bytes were taken; always True with `waits`.

        Raises:
            InvalidInputError: `count` is more than the limit.
        """
        budget = self._budget
        if budget.limit is not None and count > budget.limit:
            raise InvalidInputError(
                f"{what} stages {count} bytes of host memory on this rank, more than staging_limit_bytes="
                f"{budget.limit}: raise the limit, or save from more ranks"
            )
        with budget._changed:
            if self._take_now(count):
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
            budget._changed.wait_for(lambda: self._take_now(count))
        _logger.warning("%s waited %.3f s", what, time.monotonic() - started)
        return True

    def give_back(self) -> None:
        """Give back what it holds. Does nothing the second time."""
        with self._budget._changed:
            held, self._held = self._held, 0
            self._budget._in_use -= held
            self._budget._changed.notify_all()

    def _take_now(self, count: int) -> bool:
        budget = self._budget
        if budget.limit is not None and budget._in_use + count > budget.limit:
            return False
        budget._in_use += count
        self._held = count
        budget._peak = max(budget._peak, budget._in_use)
        return True
