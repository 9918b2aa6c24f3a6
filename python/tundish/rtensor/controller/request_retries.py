"""Sends requests to workers, and repeats those that failed until they succeed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from tundish.errors import TransferError
from tundish.rtensor.controller.responses import failures_of, raise_failures
from tundish.rtensor.controller.serverless_drains import ServerlessDrains
from tundish.rtensor.workers.connections import HttpRequest, NoAnswerError, WorkerConnections
from tundish.rtensor.workers.worker import Worker

__all__ = ["PendingRequests", "WorkerRequest"]

_log = logging.getLogger("tundish.rtensor")


class WorkerRequest(NamedTuple):
    """A request to one worker; one without a server has its drain function called with `shard_ids` instead."""

    worker: Worker
    request: HttpRequest
    shard_ids: list[str]


class PendingRequests:
    """Requests of one controller to its workers.

    Invariants:
        Failed requests are repeated in the order in which their batches were sent, one batch after the other: so
        consumers are drained before owners.
    """

    def __init__(self, connections: WorkerConnections, serverless_drains: ServerlessDrains) -> None:
        self._connections = connections
        self._serverless_drains = serverless_drains
        self._failed: list[list[WorkerRequest]] = []

    def send(self, requests: Iterable[tuple[Worker, HttpRequest]]) -> dict[Worker, Any]:
        """Send requests to all workers at once; return the answer or the failure of each."""
        asked = list(requests)
        return dict(zip([worker for worker, _ in asked], self._connections.send_all(asked), strict=True))

    def send_until_done(
        self, requests: Iterable[WorkerRequest], *, after: Mapping[Worker, Any] | None = None
    ) -> dict[Worker, Any]:
        """Send as `send` does, and call drain functions. A failure is logged, and repeated by `repeat_failed`.

        Args:
            requests: the requests.
            after: answers of the same drain. Workers that gave none are not waited for again, and have failed.
        """
        batch = list(requests)
        answers: dict[Worker, Any] = {
            request.worker: TransferError(f"{request.worker} was not asked: it gave no answer before")
            for request in batch
            if isinstance((after or {}).get(request.worker), NoAnswerError)
        }
        asked = [request for request in batch if request.worker not in answers]
        answers |= self.send(
            (request.worker, request.request) for request in asked if request.worker.drain is None
        )
        answers |= self._serverless_drains.call(
            (request.worker, request.shard_ids) for request in asked if request.worker.drain is not None
        )
        failures = failures_of(answers)
        for failure in failures.values():
            _log.warning("a worker could not be drained, which is tried again: %s", failure)
        failed = [request for request in batch if request.worker in failures]
        if failed:
            self._failed.append(failed)
        return answers

    def repeat_failed(self) -> None:
        """Repeat all requests that failed.

        Raises:
            DrainError: some failed again. They stay pending.
        """
        failed, self._failed = self._failed, []
        answers: dict[Worker, Any] = {}
        for batch in failed:
            answers |= failures_of(self.send_until_done(batch, after=answers))
        raise_failures(
            "could not be drained, now and before (leave out with update() those that are gone)", answers
        )

    def keep_only(self, addresses: Set[str]) -> None:
        """Drop pending requests to other addresses."""
        kept = [[request for request in batch if request.worker.addr in addresses] for batch in self._failed]
        self._failed = [batch for batch in kept if batch]
