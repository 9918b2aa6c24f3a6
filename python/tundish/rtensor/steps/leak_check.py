"""Warns of a process that fetches for long while no step ever begins in it."""

from __future__ import annotations

import json
import logging
import math
import os
import time

from tundish._native import ShardStore

__all__ = ["LeakCheck", "leak_check"]

_log = logging.getLogger("tundish.rtensor")
# A job may fetch for long before its first step.
_FIRST_SECONDS = 60.0


class LeakCheck:
    """Looks at the fetch buffer after a minute of fetches, and then in growing intervals, until a step begins."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._next_look = -math.inf
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._began, self._next_look = None, -math.inf

    def after_fetch(self) -> None:
        """Warns if this process has fetched for long and no step ever began in it. Cheap."""
        now = time.monotonic()
        if now < self._next_look:
            return
        if self._began is None:
            self._began, self._next_look = now, now + _FIRST_SECONDS
            return
        stats = json.loads(ShardStore.stats())
        # A step that fetched nothing here claimed shards only: this process is no worker of that controller.
        if stats["current_epoch"] is not None or any(step["fetched_bytes"] for step in stats["epochs"]):
            self._next_look = math.inf
            return
        seconds = now - self._began
        self._next_look = now + max(seconds, _FIRST_SECONDS)
        buffer = stats["buffer"]
        if buffer["num_entries"]:
            _log.warning(
                "this process has fetched for %.0f s, and no step ever began in it: %d entries (%d bytes) are in its "
                "fetch buffer, and stay until it is full. Call serve() and name this process among the workers of "
                "the Controller, or fetch within step(), or call drain() once a step",
                seconds,
                buffer["num_entries"],
                buffer["total_bytes"],
            )


leak_check = LeakCheck()
