"""What a controller says to its workers: small requests over a connection each.

What always holds: a connection is kept as long as its `Lines`, since a worker gives up what was claimed through one
that ends; every request has a deadline; the token goes to workers alone, not to addresses that come from handles.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple, TypeVar

from tundish.errors import InvalidInputError, NotAuthorizedError, TransferError

__all__ = ["Lines", "Request", "Worker", "split_address"]

_MOST_AT_ONCE = 32
_LONGEST_ANSWER = 64 << 20
# Of ids in a request: some megabytes, which no worker refuses.
_MOST_IDS = 1 << 16
_TURN_SECONDS = 0.25
_UNAUTHORIZED = 401
_FORBIDDEN = 403
_WRONG = 400

# What connections are known by.
_made = itertools.count()

T = TypeVar("T")


class Worker(NamedTuple):
    """A process that a controller drains.

    Attributes:
        addr: where it serves.
        role: what it is, for messages: actor, critic, ref.
        rank: which of these.
        drain: for a process that does not serve, such as one of an inference server: called with the ids of the
            shards that it is to drop, and for the end of a step with those that the step claimed.
    """

    addr: str
    role: str = "worker"
    rank: int = 0
    drain: Callable[[list[str]], object] | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.rank} at {self.addr}"


class Request(NamedTuple):
    """Method, path, and what is sent with it as JSON, or None."""

    method: str
    path: str
    content: Mapping[str, Any] | None = None


class Lines:
    """Connections to workers, one each."""

    def __init__(self, token: str | None, timeout: float) -> None:
        self._token = token
        self._timeout = timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def ask_all(self, requests: Iterable[tuple[Worker, Request]], trusted: bool) -> list[Any]:
        """The answers of all workers, in order: what came as JSON, or the exception that it came to.

        `trusted`: whether they are shown the token.
        """
        return self.call_all([partial(self.ask, worker, request, trusted) for worker, request in requests])

    def ask(self, worker: Worker, request: Request, trusted: bool) -> Any:
        """The answer of one worker. Raises `TransferError` and `NotAuthorizedError`."""
        with self._lock:
            line = self._lines.get(worker.addr)
            if line is None:
                token = self._token if trusted else None
                line = self._lines[worker.addr] = _Line(worker.addr, token, self._timeout)
        content = request.content or {}
        ids: Sequence[str] = content.get("shard_ids") or ()
        answer = line.ask(worker, request._replace(content=_with_ids(content, ids, 0)))
        for start in range(_MOST_IDS, len(ids), _MOST_IDS):
            more = line.ask(worker, request._replace(content=_with_ids(content, ids, start)))
            answer = {key: _joined(value, more[key]) for key, value in answer.items()}
        return answer

    def call_all(self, calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """What the calls came to, in order; several at once."""
        if not calls:
            return []
        if len(calls) == 1:
            return [_outcome(calls[0])]
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE, "tundish-rtensor")
        futures = [self._threads.submit(_outcome, call) for call in calls]
        # In turns, each of which a signal ends.
        while concurrent.futures.wait(futures, _TURN_SECONDS).not_done:
            pass
        return [future.result() for future in futures]

    def made(self, addr: str) -> int | None:
        """A number that tells the connection to `addr` from all others, also from one that it was made again as."""
        with self._lock:
            line = self._lines.get(addr)
        return None if line is None else line.made

    def forget(self, addresses: Iterable[str]) -> None:
        """Close the lines to these addresses."""
        with self._lock:
            gone = [self._lines.pop(one, None) for one in list(addresses)]
        for line in gone:
            if line is not None:
                line.close()

    def forget_all_but(self, addresses: Set[str]) -> None:
        """Close the lines to all other addresses."""
        with self._lock:
            others = self._lines.keys() - addresses
        self.forget(others)

    def close(self) -> None:
        """Close all of them; the workers give up what was claimed through them."""
        if self._threads is not None:
            self._threads.shutdown(wait=self._pid == os.getpid())
            self._threads = None
        self.forget(self._lines)


class _Line:
    """One connection, which is made when it is first used, and again where it was lost."""

    def __init__(self, addr: str, token: str | None, timeout: float) -> None:
        host, port = split_address(addr)
        self.made: int | None = None
        self._lock = threading.Lock()
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout)

    def ask(self, worker: Worker, request: Request) -> Any:
        content = None if request.content is None else json.dumps(request.content).encode()
        deadline = time.monotonic() + self._timeout
        with self._lock:
            is_kept = self._connection.sock is not None
            try:
                try:
                    status, text = self._exchange(request, content, deadline)
                except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                    self._connection.close()
                    # A connection that was kept may have been closed since; what these requests do can be done twice.
                    if not is_kept:
                        raise
                    status, text = self._exchange(request, content, deadline)
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                reason = str(error) or type(error).__name__
                raise TransferError(
                    f"{worker} does not answer ({request.method} {request.path}): {reason}; does that process still "
                    "run?"
                ) from error
        return _read(worker, request, status, text)

    def _exchange(self, request: Request, content: bytes | None, deadline: float) -> tuple[int, bytes]:
        connection = self._connection
        connection.timeout = max(0.001, deadline - time.monotonic())
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        else:
            connection.connect()
            self.made = next(_made)
        connection.request(request.method, request.path, content, self._headers)
        response = connection.getresponse()
        text = response.read(_LONGEST_ANSWER + 1)
        if len(text) > _LONGEST_ANSWER:
            raise http.client.HTTPException(f"the answer is longer than {_LONGEST_ANSWER} bytes")
        return response.status, text

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _with_ids(content: Mapping[str, Any], ids: Sequence[str], start: int) -> Mapping[str, Any] | None:
    """What is sent of a long list of ids in one request."""
    return {**content, "shard_ids": ids[start : start + _MOST_IDS]} if ids else content or None


def _joined(one: Any, other: Any) -> Any:
    """Of the answers to two such requests: sums of counts, lists one after the other."""
    return one + other if isinstance(one, (int, list)) else other


def split_address(addr: str) -> tuple[str, int]:
    """Host and port. Raises `InvalidInputError`."""
    host, colon, port = addr.rpartition(":") if isinstance(addr, str) else ("", "", "")
    if not host or not colon or not (port.isascii() and port.isdigit()) or int(port) >= 2**16:
        raise InvalidInputError(f"{addr!r} is no address of a process: host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _read(worker: Worker, request: Request, status: int, text: bytes) -> Any:
    try:
        answer = json.loads(text) if text else {}
    except ValueError:
        answer = None
    if status in (_UNAUTHORIZED, _FORBIDDEN):
        raise NotAuthorizedError(
            f"{worker} refuses {request.method} {request.path}: it wants the token that it was served with"
        )
    if status >= _WRONG or answer is None:
        reason = (
            answer.get("message", answer) if isinstance(answer, dict) else text[:200].decode(errors="replace")
        )
        raise TransferError(f"{worker} refuses {request.method} {request.path} ({status}): {reason}")
    return answer


def _outcome(call: Callable[[], T]) -> T | Exception:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (the caller's to judge, beside those of the other workers)
        return error
