"""Warns of what a process still holds after the end of a step or a drain.

Invariants:
    A number of the wrong type counts as none: an answer of a worker never stops training.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["entries_left", "integer_in", "warn_of_escaped"]

_log = logging.getLogger("tundish.rtensor")


def warn_of_escaped(holder: str, number: int, step_counts: dict[str, Any]) -> None:
    """Warn if tensors that were handed out in a step are still in use after its end.

    Args:
        holder: the process, for the message.
        number: the step.
        step_counts: the counts of the step, as `/step/<number>/end` answers it.
    """
    escaped = integer_in(step_counts, "escaped_bytes")
    if escaped:
        _log.warning(
            "%s: %d bytes of step %d escaped: tensors that were handed out in the step are still in use",
            holder,
            escaped,
            number,
        )


def entries_left(holder: str, stats: Any, *, is_step_over: bool) -> int:
    """The number of entries left in a fetch buffer, with a warning if there are any. Kept entries do not count.

    Args:
        holder: the process, for the message.
        stats: its fetch buffer's counts, as `/buffer/stats` answers them.
        is_step_over: entries that were fetched for the next step do not count.
    """
    if not isinstance(stats, dict):
        _log.debug("%s did not report its fetch buffer: %s", holder, stats)
        return 0
    own = ("kept", "current") if is_step_over else ("kept",)
    entries = integer_in(stats, "num_entries") - sum(integer_in(stats, f"{kind}_entries") for kind in own)
    size = integer_in(stats, "total_bytes") - sum(integer_in(stats, f"{kind}_bytes") for kind in own)
    if entries > 0:
        _log.warning(
            "%s still has %s (%d bytes) in its fetch buffer after the drain, the oldest of step %s",
            holder,
            "1 entry" if entries == 1 else f"{entries} entries",
            size,
            stats.get("oldest_step"),
        )
    else:
        _log.debug("%s is drained", holder)
    return max(0, entries)


def integer_in(answer: dict[str, Any], key: str) -> int:
    """The integer under a key, or 0."""
    found = answer.get(key, 0)
    return found if isinstance(found, int) else 0
