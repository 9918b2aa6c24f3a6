"""Workers of a controller, and the requests to them, over one connection each. Does not import torch.

`PendingRequests` repeats requests that failed, and `ServerlessDrains` calls the functions of workers without a server.

Invariants:
    A connection stays open as long as its `WorkerConnections`: a worker gives up what was claimed on it when it ends.
    A token goes only to the addresses that this process trusts with it, not to others that handles name.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from tundish._native import WorkerClient
from tundish.daemon_thread import DaemonThread
from tundish.errors import (
    DrainError,
    InvalidInputError,
    InvalidTypeError,
    NotAuthorizedError,
    TimedOutError,
    TransferError,
    format_count,
    format_type,
)
from tundish.rtensor.server import Trust, split_address, trusted

_log = logging.getLogger("tundish.rtensor")

# Ids in one request, the most that a worker takes.
_MOST_IDS = 1 << 16
# Threads only wait for answers. Behind that many silent workers the others wait for a timeout.
_MOST_THREADS = 256
# A signal that arrives between two looks for one does not end a wait of the standard library.
_WAIT_SECONDS = 0.5
_OK = 200
_BAD_REQUEST = 400
_UNAUTHORIZED = 401
_FORBIDDEN = 403
_LONGEST_REASON = 1000
_LONGEST_SHOWN = 100
_SHOWN_FAILURES = 4


class Worker(NamedTuple):
    """A process that a controller drains.

    Attributes:
        addr: the address of its server, `"host:port"`; any name, where `drain` is given.
        role: its role, for messages: actor, critic, ref.
        rank: its rank within the role.
        drain: for a process without a server, such as an inference server's. The controller calls it with the ids of
            the shards to drop; at the end of a step these are the ids that the step claimed. It runs on a thread of
            its own. The controller waits for it no longer than its `timeout`.

    Example:
        >>> import tundish as td
        >>> print(td.rtensor.Worker("10.0.0.2:7000", "actor", 3))
        actor 3 at 10.0.0.2:7000
    """

    addr: str
    role: str = "worker"
    rank: int = 0
    drain: Callable[[list[str]], object] | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.rank} at {self.addr}"


def as_worker(given: Any) -> Worker:
    """Return a `Worker`, or make one of a tuple or list.

    Raises:
        InvalidTypeError: a field has the wrong type.
        InvalidInputError: the address is not `host:port`.
    """
    if isinstance(given, Worker):
        worker = given
    elif isinstance(given, (tuple, list)) and 1 <= len(given) <= len(Worker._fields):
        worker = Worker(*given)
    else:
        raise InvalidTypeError(f"{given!r} is not a worker: give Worker(addr, role, rank)")
    if isinstance(worker.rank, bool) or not isinstance(worker.rank, int):
        raise InvalidTypeError(f"rank of {worker} is {format_type(worker.rank)}: give an integer")
    if worker.drain is None:
        split_address(worker.addr)
        return worker
    if not callable(worker.drain):
        raise InvalidTypeError(f"drain of {worker} is {format_type(worker.drain)}: give a function")
    try:
        hash(worker)
    except TypeError as error:
        raise InvalidTypeError(f"{worker} is not hashable ({error}): give a function as its drain") from None
    return worker


class NoAnswerError(TransferError):
    """A worker gave no answer in time, or cannot be reached."""


class HttpRequest:
    """A request for one or many workers: method, path and JSON bodies, which are encoded once.

    Attributes:
        bodies: the bodies to send one after the other: a long list of ids is split.
    """

    def __init__(self, method: str, path: str, shard_ids: Sequence[str] | None = None) -> None:
        self.method = method
        self.path = path
        self.bodies: list[bytes | None] = [None]
        if shard_ids is not None:
            starts = range(0, len(shard_ids), _MOST_IDS) or (0,)
            parts = [shard_ids[start : start + _MOST_IDS] for start in starts]
            self.bodies = [json.dumps({"shard_ids": part}).encode() for part in parts]


class WorkerConnections:
    """One connection to each worker.

    Args:
        timeout: seconds within which a worker has to answer a request.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._clients: dict[str, WorkerClient] = {}
        self._threads: ThreadPoolExecutor | None = None

    def send_all(self, requests: Iterable[tuple[Worker, HttpRequest]]) -> list[Any]:
        """Send requests to all workers at once.

        Returns:
            In order, each worker's answer (decoded JSON) or its failure: a `TransferError`, `NotAuthorizedError` or
            `InvalidInputError`.

        Interrupted, it closes all connections: the answers that are under way would be taken for those to later
        requests.
        """
        wanted = list(requests)
        if not wanted:
            return []
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST_THREADS, "tundish-rtensor")
        futures = [self._threads.submit(self._send, *one) for one in wanted]
        try:
            while wait(futures, _WAIT_SECONDS).not_done:
                pass
        except BaseException:
            self.close()
            raise
        return [future.exception() or future.result() for future in futures]

    def numbers(self) -> dict[str, int | None]:
        """A number of each connection, by address. It changes when the connection was lost and made again."""
        with self._lock:
            return {addr: client.connection_number for addr, client in self._clients.items()}

    def keep_only(self, addresses: Set[str]) -> None:
        """Close the connections to all other addresses; requests under way on them fail."""
        with self._lock:
            closing = [self._clients.pop(addr) for addr in self._clients.keys() - addresses]
        for client in closing:
            client.close()

    def close(self) -> None:
        """Close all connections. The next request opens new ones."""
        self.keep_only(frozenset())
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _send(self, worker: Worker, request: HttpRequest) -> Any:
        trust = trusted.get(worker.addr, Trust())
        with self._lock:
            client = self._clients.get(worker.addr)
            if client is None:
                client = self._clients[worker.addr] = WorkerClient(
                    worker.addr, trust.token, tls=trust.certificates
                )
        answers = []
        for body in request.bodies:
            try:
                status, text = client.request(request.method, request.path, body, timeout=self._timeout)
            except (TransferError, TimedOutError, InvalidInputError) as error:
                raise NoAnswerError(
                    f"{worker} does not answer ({request.method} {request.path}): {error}"
                ) from error
            if status == _UNAUTHORIZED:
                ours = "none for it" if trust.token is None else "another one for it"
                raise NotAuthorizedError(
                    f"{worker} wants the token of its server, and this process has {ours}: call "
                    f"trust({worker.addr!r}, token=…)"
                )
            answers.append(_decode(worker, request, status, text))
        return _merge(answers)


def _merge(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer to a request that was split: counts are added, lists concatenated."""
    merged = answers[0]
    for answer in answers[1:]:
        for key, value in answer.items():
            is_sum = isinstance(value, (int, list)) and type(value) is type(merged.get(key))
            merged[key] = merged[key] + value if is_sum else value
    return merged


def _decode(worker: Worker, request: HttpRequest, status: int, text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text) if text else None
    except (ValueError, RecursionError):
        answer = None
    if status >= _BAD_REQUEST:
        reason = answer.get("message", "") if isinstance(answer, dict) else text.decode(errors="replace")
        kind = NotAuthorizedError if status == _FORBIDDEN else TransferError
        raise kind(
            f"{worker} refuses {request.method} {request.path} ({status}): {str(reason)[:_LONGEST_REASON]}"
        )
    if status != _OK or not isinstance(answer, dict) or not answer:
        # A proxy, say, that accepts everything has drained nothing.
        shown = text.decode(errors="replace")[:_LONGEST_SHOWN]
        raise TransferError(
            f"{worker} answers {request.method} {request.path} with {status} {shown!r}: the server there is no "
            "process of tundish"
        )
    return answer


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
            "could not be drained twice in a row (leave out with update() those that are gone)", answers
        )

    def keep_only(self, addresses: Set[str]) -> None:
        """Drop pending requests to other addresses."""
        kept = [[request for request in batch if request.worker.addr in addresses] for batch in self._failed]
        self._failed = [batch for batch in kept if batch]


class ServerlessDrains:
    """Calls drain functions, each on a daemon thread of its own.

    A function that exceeds the timeout has failed, though its thread goes on; it is not called again before it ends.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running: dict[Worker, Future[object]] = {}

    def call(self, calls: Iterable[tuple[Worker, list[str]]]) -> dict[Worker, dict[str, Any] | Exception]:
        """Call all functions at once; return `{}` or the failure of each."""
        answers: dict[Worker, dict[str, Any] | Exception] = {}
        begun: dict[Worker, Future[object]] = {}
        ids_of = dict(calls)
        wait([self._running[worker] for worker in ids_of if worker in self._running], self._timeout)
        for worker, ids in ids_of.items():
            if worker in self._running and not self._running[worker].done():
                answers[worker] = TransferError(f"{worker} fails: an earlier call of its drain still runs")
            elif worker.drain is not None:
                thread = DaemonThread("tundish-rtensor-drain")
                begun[worker] = self._running[worker] = thread.submit(functools.partial(worker.drain, ids))
        wait(begun.values(), self._timeout)
        for worker, future in begun.items():
            answers[worker] = self._answer(worker, future)
        return answers

    def _answer(self, worker: Worker, future: Future[object]) -> dict[str, Any] | Exception:
        if not future.done():
            return TransferError(
                f"{worker} fails: its drain function has not ended within {self._timeout:g} s"
            )
        error = future.exception()
        if error is None:
            return {}
        failure = TransferError(f"{worker} fails: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure


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
