"""A look at whether what a process fetches is ever drained.

What always holds: a process that goes on fetching, while no step ever began in it, is warned of what it holds, again
and again in growing intervals; the look is rare, and none of one where steps begin.
"""

from __future__ import annotations

import json
import logging
import math
import time

from tundish._native import ShardStore

__all__ = ["Watch"]

_log = logging.getLogger("tundish.rtensor")
# A job's first fetches come before its first step, which may be long in coming.
_FIRST_SECONDS = 60.0


class Watch:
    """Of one process."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._due = -math.inf

    def fetched(self) -> None:
        """Something was fetched, and may have been kept in the buffer."""
        now = time.monotonic()
        if now < self._due:
            return
        if self._began is None:
            self._began, self._due = now, now + _FIRST_SECONDS
            return
        told = json.loads(ShardStore.stats())
        # Others only claimed what is stored here: this process is no worker of their controller.
        if told["current_epoch"] is not None or any(step["fetched_bytes"] for step in told["epochs"]):
            self._due = math.inf
            return
        seconds = now - self._began
        self._due = now + max(seconds, _FIRST_SECONDS)
        buffer = told["buffer"]
        if buffer["num_entries"]:
            _log.warning(
                "this process has fetched for %.0f s, and no step ever began in it: %d entries (%d bytes) are in its "
                "fetch buffer, and stay until it is full. Let it serve() and name it among the workers of the "
                "Controller, or fetch within step(), or call drain() once a step",
                seconds,
                buffer["num_entries"],
                buffer["total_bytes"],
            )
