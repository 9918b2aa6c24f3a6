"""Reads the answers of workers, and turns failures into one error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tundish.errors import DrainError, ShardGoneError, format_count, format_list
from tundish.rtensor.steps.leak_warnings import integer_in
from tundish.rtensor.workers.worker import Worker

__all__ = ["check_claim_answers", "failures_of", "names_in", "raise_failures", "total"]

_SHOWN_FAILURES = 4


def raise_failures(what: str, answers: Mapping[Worker, Any]) -> None:
    """Raise `DrainError` with all failures among `answers`, if there are any."""
    failed = failures_of(answers)
    if not failed:
        return
    shown = "; ".join(str(error) for error in list(failed.values())[:_SHOWN_FAILURES])
    more = f"; and {len(failed) - _SHOWN_FAILURES} more" if len(failed) > _SHOWN_FAILURES else ""
    message = f"{format_count(len(failed), 'worker')} {what}: {shown}{more}"
    raise DrainError(message, tuple(failed)) from next(iter(failed.values()))


def failures_of(answers: Mapping[Worker, Any]) -> dict[Worker, Exception]:
    return {worker: answer for worker, answer in answers.items() if isinstance(answer, Exception)}


def check_claim_answers(answers: Mapping[Worker, Any]) -> None:
    """Raise `ShardGoneError` if a worker could not claim all shards."""
    for worker, answer in answers.items():
        for key, what in (
            ("missing_shard_ids", "does not store, or has drained or removed,"),
            ("taken_shard_ids", "has claims of another step on"),
        ):
            names = names_in(answer, key)
            if names:
                raise ShardGoneError(f"{worker} {what} these shards: {format_list(names)}")


def names_in(answer: dict[str, Any], key: str) -> list[str]:
    found = answer.get(key)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def total(answers: Mapping[Worker, Any], key: str) -> int:
    return sum(integer_in(answer, key) for answer in answers.values() if isinstance(answer, dict))
