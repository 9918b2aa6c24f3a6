"""Warns of a process that fetches for long while no step ever begins in it."""

from __future__ import annotations

import json
import logging
import math
import time

from tundish._native import ShardStore
from tundish.rtensor.process_state import state

__all__ = ["warn_if_no_step_began"]

_log = logging.getLogger("tundish.rtensor")
# A job may fetch for long before its first step.
_SECONDS = 60.0


def warn_if_no_step_began() -> None:
    """Warn once, if this process has fetched for a minute and no step ever began in it. Cheap."""
    mine = state()
    now = time.monotonic()
    if mine.step_check_due is None:
        mine.step_check_due = now + _SECONDS
    if now < mine.step_check_due:
        return
    mine.step_check_due = math.inf
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
