"""Sends requests to workers, and repeats those that failed until they succeed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

from tundish.errors import TransferError
from tundish.rtensor.controller.drain_functions import DrainFunctions
from tundish.rtensor.controller.responses import failures_of, raise_failures
from tundish.rtensor.workers.connections import NoAnswerError, Request, WorkerConnections
from tundish.rtensor.workers.worker import Worker

__all__ = ["PendingRequests", "WorkerRequest"]

_log = logging.getLogger("tundish.rtensor")


class WorkerRequest(NamedTuple):
    """A request to one worker; one without a server has its drain function called with `shard_ids` instead."""

    worker: Worker
    request: Request
    shard_ids: list[str]


class PendingRequests:
    """Requests of one controller to its workers.

    Invariants:
        Failed requests are repeated in the order in which their batches were sent, one batch after the other: so
        consumers are drained before owners.
    """

    def __init__(self, client: WorkerConnections, drain_functions: DrainFunctions) -> None:
        self._connections = client
        self._drain_functions = drain_functions
        self._failed: list[list[WorkerRequest]] = []
        # Within a drain, the workers that gave no answer.
        self._silent: set[Worker] | None = None

    @contextlib.contextmanager
    def skip_silent_workers(self) -> Iterator[None]:
        """Within the block, a worker that gave no answer is not asked again: each timeout is waited for once."""
        self._silent = set()
        try:
            yield
        finally:
            self._silent = None

    def send(self, requests: Iterable[tuple[Worker, Request]]) -> dict[Worker, Any]:
        """Sends requests to all workers at once; returns the answer or the failure of each."""
        silent = self._silent
        answers: dict[Worker, Any] = {}
        asked: list[tuple[Worker, Request]] = []
        for worker, request in requests:
            if silent is not None and worker in silent:
                answers[worker] = TransferError(f"{worker} was not asked: it gave no answer before")
            else:
                asked.append((worker, request))
        answers |= zip([worker for worker, _ in asked], self._connections.send_all(asked), strict=True)
        if silent is not None:
            silent |= {worker for worker, answer in answers.items() if isinstance(answer, NoAnswerError)}
        return answers

    def send_until_done(self, requests: Iterable[WorkerRequest]) -> dict[Worker, Any]:
        """Sends as `send` does, and calls drain functions. A failure is logged, and repeated by `repeat_failed`."""
        batch = list(requests)
        answers = self.send((one.worker, one.request) for one in batch if one.worker.drain is None)
        answers |= self._drain_functions.call(
            (one.worker, one.shard_ids) for one in batch if one.worker.drain is not None
        )
        for failure in failures_of(answers).values():
            _log.warning("a worker could not be drained, which is tried again: %s", failure)
        failed = [one for one in batch if isinstance(answers[one.worker], Exception)]
        if failed:
            self._failed.append(failed)
        return answers

    def repeat_failed(self) -> None:
        """Repeats all requests that failed.

        Raises:
            DrainError: some failed again. They stay pending.
        """
        failed, self._failed = self._failed, []
        failures: dict[Worker, Exception] = {}
        for batch in failed:
            failures |= failures_of(self.send_until_done(batch))
        raise_failures(
            "could not be drained, now and before (leave out with update() what is gone)", failures
        )

    def keep_only(self, addresses: Set[str]) -> None:
        """Drops pending requests to other addresses."""
        kept = [[one for one in batch if one.worker.addr in addresses] for batch in self._failed]
        self._failed = [batch for batch in kept if batch]
