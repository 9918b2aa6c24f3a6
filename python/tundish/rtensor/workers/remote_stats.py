"""`process_stats`: the `/stats` of other processes, for the command line and for monitoring. Does not import torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from tundish.errors import InvalidTypeError
from tundish.rtensor.workers.connections import HttpRequest, WorkerConnections
from tundish.rtensor.workers.worker import Worker, as_worker
from tundish.timeouts import check_seconds

__all__ = ["process_stats"]


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
