"""Warns of a process that fetches for long while no step ever begins in it."""

from __future__ import annotations

import json
import logging
import os
import time

from tundish._native import ShardStore

__all__ = ["NoStepWarning", "no_step_warning"]

_log = logging.getLogger("tundish.rtensor")
# A job may fetch for long before its first step.
_SECONDS = 60.0


class NoStepWarning:
    """Looks at the fetch buffer once, a minute after the first fetch, and warns if no step ever began."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._due: float | None = None
        self._is_done = False

    def after_fetch(self) -> None:
        """Warns if this process has fetched for a minute and no step ever began in it. Cheap."""
        if self._is_done:
            return
        now = time.monotonic()
        if self._due is None:
            self._due = now + _SECONDS
        if now < self._due:
            return
        self._is_done = True
        stats = json.loads(ShardStore.stats())
        # A step that fetched nothing here claimed shards only: this process is no worker of that controller.
        if stats["current_step"] is None and not any(step["fetched_bytes"] for step in stats["steps"]):
            _log.warning(
                "this process has fetched for a minute, and no step ever began in it: %d entries (%d bytes) are in its "
                "fetch buffer, and stay until it is full. Call serve() and name this process among the workers of "
                "the Controller, or fetch within step(), or call drain() once a step",
                stats["buffer"]["num_entries"],
                stats["buffer"]["total_bytes"],
            )


no_step_warning = NoStepWarning()
