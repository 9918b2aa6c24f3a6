"""What workers answered to a controller, and what that comes to.

What always holds: an answer is what came as JSON, or the exception that it came to; a failure is told with all workers
that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tundish.errors import DrainError, ShardGoneError, TransferError, counted
from tundish.rtensor.lines import Worker

__all__ = ["check_claim", "failures_of", "hook_answer", "look_at_ledger", "refuse", "total"]

_log = logging.getLogger("tundish.rtensor")
_NAMED = 8


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
        names: Sequence[str] = answer.get(key, ())
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ShardGoneError(f"{worker} {what} these shards: {', '.join(names[:_NAMED])}{more}")


def look_at_ledger(worker: Worker, number: int, ledger: dict[str, Any]) -> None:
    if ledger.get("held_bytes"):
        _log.warning("%s still holds %d bytes of step %d after its end", worker, ledger["held_bytes"], number)
    elif ledger.get("has_ended") and ledger.get("viewed_bytes"):
        _log.warning(
            "%d bytes of step %d escaped on %s: tensors that were handed out in the step are still in use there",
            ledger["viewed_bytes"],
            number,
            worker,
        )


def failures_of(answers: dict[Worker, Any]) -> dict[Worker, Exception]:
    return {worker: answer for worker, answer in answers.items() if isinstance(answer, Exception)}


def total(answers: dict[Worker, Any], key: str) -> int:
    return sum(int(answer.get(key, 0)) for answer in answers.values() if isinstance(answer, dict))


def hook_answer(worker: Worker, answer: Any) -> Any:
    """What a function that drains came to, as of a worker that serves."""
    if not isinstance(answer, Exception):
        return {}
    error = TransferError(f"{worker} fails: {type(answer).__name__}: {answer}")
    error.__cause__ = answer
    return error


def _described(what: str, failures: dict[Worker, Exception]) -> str:
    shown = "; ".join(str(error) for error in list(failures.values())[:4])
    more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
    return f"{counted(len(failures), 'worker')} {what}: {shown}{more}"
