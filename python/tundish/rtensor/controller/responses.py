"""Reads the answers of workers, warns of leaks, and turns failures into one error.

Invariants:
    A number or name of the wrong type in an answer counts as none: an answer of a worker never stops training.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tundish.errors import DrainError, ShardGoneError, counted
from tundish.rtensor.workers.worker import Worker

__all__ = [
    "check_claim",
    "entries_left",
    "failures_of",
    "names_in",
    "raise_failures",
    "total",
    "warn_of_ledger",
]

_log = logging.getLogger("tundish.rtensor")
# Of failures and of shards, in one message.
_SHOWN_FAILURES = 4
_SHOWN_NAMES = 8


def raise_failures(what: str, answers: Mapping[Worker, Any]) -> None:
    """Raises `DrainError` with all failures among `answers`, if there are any."""
    failed = failures_of(answers)
    if not failed:
        return
    shown = "; ".join(str(error) for error in list(failed.values())[:_SHOWN_FAILURES])
    more = f"; and {len(failed) - _SHOWN_FAILURES} more" if len(failed) > _SHOWN_FAILURES else ""
    message = f"{counted(len(failed), 'worker')} {what}: {shown}{more}"
    raise DrainError(message, tuple(failed)) from next(iter(failed.values()))


def failures_of(answers: Mapping[Worker, Any]) -> dict[Worker, Exception]:
    return {worker: answer for worker, answer in answers.items() if isinstance(answer, Exception)}


def check_claim(worker: Worker, answer: dict[str, Any]) -> None:
    """Raises `ShardGoneError` where a worker could not claim all shards."""
    for key, what in (
        ("missing_shard_ids", "has not got, or has drained or removed,"),
        ("taken_shard_ids", "holds for another step"),
    ):
        names = names_in(answer, key)
        if names:
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            raise ShardGoneError(f"{worker} {what} these shards: {', '.join(names[:_SHOWN_NAMES])}{more}")


def warn_of_ledger(worker: Worker, number: int, ledger: dict[str, Any]) -> None:
    """Warns of bytes that a worker holds after the end of a step, or whose tensors are in use still."""
    held, escaped = _integer(ledger, "held_bytes"), _integer(ledger, "escaped_bytes")
    if held:
        _log.warning("%s still holds %d bytes of step %d after its end", worker, held, number)
    elif escaped:
        _log.warning(
            "%d bytes of step %d escaped on %s: tensors that were handed out in the step are still in use there",
            escaped,
            number,
            worker,
        )


def entries_left(worker: Worker, stats: Any, *, is_step_over: bool) -> int | None:
    """Entries left in a worker's fetch buffer, with a warning if there are any; None if the worker does not say.

    Args:
        worker: the worker.
        stats: its answer to `/buffer/stats`.
        is_step_over: entries that were fetched for the next step do not count.
    """
    try:
        entries = int(stats["num_entries"]) - int(stats["kept_entries"])
        size = int(stats["total_bytes"]) - int(stats["kept_bytes"])
        if is_step_over:
            entries -= int(stats["current_entries"])
            size -= int(stats["current_bytes"])
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        _log.debug("%s does not say what is left in its fetch buffer: %s", worker, stats or error)
        return None
    if entries > 0:
        _log.warning(
            "rank %d (%s) at %s still has %s (%d bytes) in its fetch buffer after the drain, the oldest of step %s",
            worker.rank,
            worker.role,
            worker.addr,
            "1 entry" if entries == 1 else f"{entries} entries",
            size,
            stats.get("oldest_epoch"),
        )
    else:
        _log.debug("%s is drained", worker)
    return entries


def names_in(answer: dict[str, Any], key: str) -> list[str]:
    found = answer.get(key)
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def total(answers: Mapping[Worker, Any], key: str) -> int:
    return sum(_integer(answer, key) for answer in answers.values() if isinstance(answer, dict))


def _integer(answer: dict[str, Any], key: str) -> int:
    found = answer.get(key, 0)
    return found if isinstance(found, int) else 0
