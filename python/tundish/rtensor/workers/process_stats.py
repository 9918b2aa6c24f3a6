"""`process_stats`: the `/stats` of other processes, for the command line and for monitoring. Does not import torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tundish.errors import InvalidInputError
from tundish.rtensor.arguments import check_seconds, check_token
from tundish.rtensor.workers.connections import Request, WorkerConnections
from tundish.rtensor.workers.worker import Worker, as_worker

__all__ = ["process_stats"]


def process_stats(
    addresses: Iterable[str], *, token_file: Path | None = None, timeout: float = 5.0
) -> dict[str, dict[str, Any] | Exception]:
    """Asks processes that serve for what they store and have fetched.

    Args:
        addresses: `"host:port"` of each process.
        token_file: a file whose first line is their token.
        timeout: seconds within which each has to answer.

    Returns:
        By address, the decoded `/stats` of the process, or its failure: a `TransferError` or `NotAuthorizedError`.

    Raises:
        InvalidInputError: an address or the token is invalid. The message names the file.
    """
    workers = [as_worker(Worker(addr)) for addr in dict.fromkeys(addresses)]
    token = None if token_file is None else _read_token(token_file)
    connections = WorkerConnections(lambda _: token, check_seconds(timeout, may_be_zero=False))
    with contextlib.closing(connections):
        answers = connections.send_all((worker, Request("GET", "/stats")) for worker in workers)
    return {worker.addr: answer for worker, answer in zip(workers, answers, strict=True)}


def _read_token(path: Path) -> str:
    try:
        token = path.read_bytes().partition(b"\n")[0].decode().strip()
        check_token(token)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: its first line is no text, and so no token") from error
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    return token
