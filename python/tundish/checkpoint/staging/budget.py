"""Bounds the host memory that saves are staged in, in bytes."""

from __future__ import annotations

import logging
import threading
import time

from tundish.errors import InvalidInputError

__all__ = ["StagingBudget"]

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

    def stats(self) -> dict[str, int | None]:
        """Bytes in use, the most there ever were, and the limit."""
        with self._changed:
            return {"in_use": self._in_use, "peak": self._peak, "limit": self.limit}

    def take(self, count: int, what: str) -> None:
        """Take bytes for a save. Waits until earlier saves give back enough, with a warning in the log.

        Args:
            count: how many bytes.
            what: the save, for messages.

        Raises:
            InvalidInputError: `count` is more than the limit.
        """
        if self.limit is not None and count > self.limit:
            raise InvalidInputError(
                f"{what} stages {count} bytes of host memory on this rank, more than staging_limit_bytes="
                f"{self.limit}: raise the limit, or save from more ranks"
            )
        with self._changed:
            if not self._has_room(count):
                started = time.monotonic()
                _logger.warning(
                    "%s waits for the save before it: it stages %d bytes, and %d of staging_limit_bytes=%s are in use",
                    what,
                    count,
                    self._in_use,
                    self.limit,
                )
                self._changed.wait_for(lambda: self._has_room(count))
                _logger.warning("%s waited %.3f s", what, time.monotonic() - started)
            self._in_use += count
            self._peak = max(self._peak, self._in_use)

    def give_back(self, count: int) -> None:
        """Give back bytes that were taken."""
        with self._changed:
            self._in_use -= count
            self._changed.notify_all()

    def _has_room(self, count: int) -> bool:
        return self.limit is None or self._in_use + count <= self.limit
