"""Counts of what processes store and have fetched, and warnings of what they still hold. Does not import torch.

Invariants:
    A number of the wrong type counts as none: an answer of a worker never stops training.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Any

from tundish.errors import InvalidTypeError
from tundish.rtensor.workers import HttpRequest, Worker, WorkerConnections, as_worker
from tundish.timeouts import check_seconds

_log = logging.getLogger("tundish.rtensor")


def process_stats(
    addresses: str | Iterable[str], *, timeout: float = 5.0
) -> dict[str, dict[str, Any] | Exception]:
    """Ask processes that serve for what they store and have fetched.

    Call `trust` before with addresses that want a token or serve over TLS.

    Args:
        addresses: `"host:port"` of one process, or of each of several.
        timeout: seconds within which each has to answer.

    Returns:
        By address, the decoded `/stats` of the process, or its failure: a `TransferError` or `NotAuthorizedError`.

    Raises:
        InvalidInputError: an address is invalid.
        InvalidTypeError: `addresses` is neither a string nor several.

    Example:
        >>> import tundish as td
        >>> with td.rtensor.serve() as server:
        ...     stats = td.rtensor.process_stats(server.addr)[server.addr]
        >>> stats["storage"]["num_entries"]
        0
    """
    given: Any = [addresses] if isinstance(addresses, str) else addresses
    if not isinstance(given, Iterable):
        raise InvalidTypeError(f'addresses is {given!r}: give a list of "host:port"')
    workers = [as_worker(Worker(addr)) for addr in dict.fromkeys(given)]
    with contextlib.closing(WorkerConnections(check_seconds(timeout, may_be_zero=False))) as connections:
        answers = connections.send_all((worker, HttpRequest("GET", "/stats")) for worker in workers)
    return {worker.addr: answer for worker, answer in zip(workers, answers, strict=True)}


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


def warn_of_fetches_without_step(stats: dict[str, Any]) -> None:
    """Warn if a store has fetched, and no step ever began in it.

    Args:
        stats: its counts, as `/stats` answers them.
    """
    # A step that fetched nothing here claimed shards only: this process is no worker of that controller.
    if stats["current_step"] is None and not any(step["fetched_bytes"] for step in stats["steps"]):
        _log.warning(
            "this process has fetched for a minute, and no step ever began in it: %d entries (%d bytes) are in its "
            "fetch buffer, and stay until it is full. Call serve() and name this process among the workers of "
            "the Controller, or fetch within step(), or call drain() once a step",
            stats["buffer"]["num_entries"],
            stats["buffer"]["total_bytes"],
        )
