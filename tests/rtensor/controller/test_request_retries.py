"""Requests to workers: which are repeated, in which order, and who is not asked again."""

from __future__ import annotations

from typing import Any

import pytest

from tundish.errors import DrainError, TransferError
from tundish.rtensor import Worker
from tundish.rtensor.workers import (
    HttpRequest,
    NoAnswerError,
    PendingRequests,
    ServerlessDrains,
    WorkerRequest,
)


class FakeConnections:
    """Gives the answers of a table, by address, and notes the requests."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    def send_all(self, requests: Any) -> list[Any]:
        self.asked.append([worker.addr for worker, _ in requests])
        return [self.answers[addr] for addr in self.asked[-1]]


def batch(*addresses: str) -> list[WorkerRequest]:
    return [WorkerRequest(Worker(addr), HttpRequest("DELETE", "/buffer/clear"), []) for addr in addresses]


def test_within_a_drain_a_worker_that_gave_no_answer_is_not_asked_again() -> None:
    connections: Any = FakeConnections(
        {"well:1": {}, "refusing:1": TransferError("it refuses"), "silent:1": NoAnswerError("no answer")}
    )
    requests = PendingRequests(connections, ServerlessDrains(30.0))
    everybody = list(connections.answers)
    answers = requests.send_until_done(batch(*everybody))
    again = requests.send_until_done(batch(*everybody), after=answers)
    assert "was not asked" in str(again[Worker("silent:1")])
    with pytest.raises(DrainError):
        requests.repeat_failed()
    assert connections.asked == [everybody, everybody[:-1], everybody[1:], ["refusing:1"]]


def test_failed_requests_are_repeated_batch_by_batch_until_they_succeed() -> None:
    failure = TransferError("it refuses")
    connections: Any = FakeConnections({"owner:1": failure, "consumer:1": failure, "well:1": {}})
    requests = PendingRequests(connections, ServerlessDrains(30.0))

    requests.send_until_done(batch("consumer:1", "well:1"))
    requests.send_until_done(batch("owner:1"))
    connections.asked.clear()
    with pytest.raises(DrainError, match="could not be drained twice in a row") as caught:
        requests.repeat_failed()
    assert {worker.addr for worker in caught.value.workers} == {"consumer:1", "owner:1"}
    connections.answers = {addr: {} for addr in connections.answers}
    requests.repeat_failed()
    requests.repeat_failed()
    assert connections.asked == [["consumer:1"], ["owner:1"]] * 2
