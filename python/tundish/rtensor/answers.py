"""What workers answered to a controller, and what that comes to.

What always holds: an answer is what came as JSON, or the exception that it came to; a failure is told with all workers
that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from tundish.errors import DrainError, ShardGoneError, counted
from tundish.rtensor.lines import Worker

__all__ = [
    "Drained",
    "by_address",
    "check_claim",
    "failures_of",
    "last_number",
    "look_at_buffer",
    "look_at_ledger",
    "names_in",
    "refuse",
    "total",
]

_log = logging.getLogger("tundish.rtensor")
_NAMED = 8
# Steps of controllers that count from 1 do not get there; what somebody has begun beyond is nothing to count on from.
_MOST_STEPS = 1 << 48


class Drained(NamedTuple):
    """What a drain came to.

    Attributes:
        entries: that consumers had fetched and have dropped.
        shards: that owners have removed.
        bytes: that these took.
        failures: what could not be drained, by worker; it is tried again.
        left: entries that are still in a buffer, by worker.
    """

    entries: int
    shards: int
    bytes: int
    failures: dict[Worker, Exception]
    left: dict[Worker, int]


def refuse(what: str, answers: dict[Worker, Any]) -> None:
    """Raises `DrainError` where one of them failed."""
    failed = failures_of(answers)
    if failed:
        raise DrainError(_described(what, failed), tuple(failed)) from next(iter(failed.values()))


def check_claim(worker: Worker, answer: dict[str, Any]) -> None:
    for key, what in (
        ("missing_shard_ids", "has not got, or has drained or removed,"),
        ("taken_shard_ids", "holds for another step"),
    ):
        names = names_in(answer, key)
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ShardGoneError(f"{worker} {what} these shards: {', '.join(names[:_NAMED])}{more}")


def look_at_ledger(worker: Worker, number: int, ledger: dict[str, Any]) -> None:
    held, escaped = _count(ledger, "held_bytes"), _count(ledger, "escaped_bytes")
    if held:
        _log.warning("%s still holds %d bytes of step %d after its end", worker, held, number)
    elif escaped:
        _log.warning(
            "%d bytes of step %d escaped on %s: tensors that were handed out in the step are still in use there",
            escaped,
            number,
            worker,
        )


def look_at_buffer(worker: Worker, answer: Any, *, is_step_over: bool, expected: int) -> int | None:
    """Entries that are left in a worker's fetch buffer, if it says so; more than `expected` are warned of.

    `is_step_over`: those of the step under way, which were fetched for the next one, are no rest.
    """
    try:
        entries, size = int(answer["num_entries"]), int(answer["total_bytes"])
        if is_step_over:
            entries -= int(answer["current_entries"])
            size -= int(answer["current_bytes"])
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        _log.debug("%s does not say what is left in its fetch buffer: %s", worker, answer or error)
        return None
    if entries > expected:
        _log.warning(
            "rank %d (%s) at %s still has %s (%d bytes) in its fetch buffer after the drain, the oldest of step %s",
            worker.rank,
            worker.role,
            worker.addr,
            "1 entry" if entries == 1 else f"{entries} entries",
            size,
            answer.get("oldest_epoch"),
        )
    else:
        _log.debug("%s is drained", worker)
    return entries


def names_in(answer: dict[str, Any], key: str) -> list[str]:
    """The names that a worker tells; what is none counts for nothing."""
    told = answer.get(key)
    return [one for one in told if isinstance(one, str)] if isinstance(told, list) else []


def failures_of(answers: dict[Worker, Any]) -> dict[Worker, Exception]:
    return {worker: answer for worker, answer in answers.items() if isinstance(answer, Exception)}


def total(answers: dict[Worker, Any], key: str) -> int:
    return sum(_count(answer, key) for answer in answers.values() if isinstance(answer, dict))


def by_address(answers: dict[Worker, Any], key: str) -> dict[str, int]:
    """What each worker says under `key`, 0 for one that says nothing."""
    return {worker.addr: total({worker: answer}, key) for worker, answer in answers.items()}


def last_number(stats: Iterable[Any]) -> int:
    """The largest number of a step that is told of, or 0; what is no such number counts for nothing."""
    told = (one.get("epochs") for one in stats if isinstance(one, dict))
    steps = [one for epochs in told if isinstance(epochs, list) for one in epochs if isinstance(one, dict)]
    numbers = [_count(step, "epoch") for step in steps]
    return max((number for number in numbers if number <= _MOST_STEPS), default=0)


def _count(answer: dict[str, Any], key: str) -> int:
    found = answer.get(key, 0)
    return found if isinstance(found, int) else 0


def _described(what: str, failures: dict[Worker, Exception]) -> str:
    shown = "; ".join(str(error) for error in list(failures.values())[:4])
    more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
    return f"{counted(len(failures), 'worker')} {what}: {shown}{more}"
