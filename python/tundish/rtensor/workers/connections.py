"""What a controller says to its workers: small requests over a connection each.

What always holds: a connection is kept as long as its `Lines`, since a worker gives up what was claimed through one
that ends, unless a request on it is interrupted; every request has a deadline; a token goes to the addresses that it is
for, not to others that come from handles; a child made by `fork` keeps no connection open.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any

from tundish.errors import NotAuthorizedError, TransferError
from tundish.rtensor.arguments import split_address
from tundish.rtensor.workers.crew import Crew, Round
from tundish.rtensor.workers.exchange import Connection
from tundish.rtensor.workers.worker import Worker
from tundish.waiting import to_its_end

__all__ = ["NoAnswerError", "Request", "WorkerConnections"]

# Of ids in a request: some megabytes, which no worker refuses.
_MOST_IDS = 1 << 16
_OK = 200
_UNAUTHORIZED = 401
_FORBIDDEN = 403
_WRONG = 400
_LONGEST_REASON = 1000
_LONGEST_SHOWN = 100

# What connections are known by.
_made = itertools.count()


class Request:
    """What one worker or many are asked: method, path, and what is sent with it as JSON, which is written once.

    Attributes:
        bodies: what is sent, one after the other: of a long list of ids some in each.
    """

    def __init__(self, method: str, path: str, shard_ids: Sequence[str] | None = None) -> None:
        self.method = method
        self.path = path
        self.bodies: list[bytes | None] = [None]
        if shard_ids is not None:
            starts = range(0, len(shard_ids), _MOST_IDS) or (0,)
            some = [shard_ids[start : start + _MOST_IDS] for start in starts]
            self.bodies = [json.dumps({"shard_ids": one}).encode() for one in some]


class WorkerConnections:
    """Connections to workers, one each.

    Attributes:
        timeout: seconds that each request may take.

    `token_for`: what is shown to the one at an address, if anything.
    """

    def __init__(self, token_for: Callable[[str], str | None], timeout: float) -> None:
        self._token_for = token_for
        self.timeout = timeout
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._crew = Crew()

    def send_all(self, requests: Iterable[tuple[Worker, Request]]) -> list[Any]:
        """The answers of all workers, in order: what came as JSON, or the exception that it came to.

        These are `TransferError`, `StepTakenError` and `NotAuthorizedError`.
        """
        wanted = list(requests)
        made = Round([partial(self._ask, worker, request) for worker, request in wanted])
        try:
            self._crew.work(made)
        except BaseException:
            # What comes next on those lines would be the answers to these.
            with self._lock:
                made.is_given_up = True
            self.disconnect(wanted[number][0].addr for number in made.undone())
            raise
        return made.outcomes

    def _ask(self, worker: Worker, request: Request, made: Round) -> Any:
        token = self._token_for(worker.addr)
        with self._lock:
            if made.is_given_up:
                raise TransferError(f"{worker} was not asked: that was interrupted")
            line = self._lines.get(worker.addr)
            if line is None:
                line = self._lines[worker.addr] = _Line(worker.addr)
        first, *others = [partial(line.ask, worker, request, body, token) for body in request.bodies]
        timeout = self.timeout
        answer = first(timeout)
        for ask in others:
            more = ask(timeout)
            answer = {key: _joined(value, more[key]) for key, value in answer.items()}
        return answer

    def made(self, addr: str) -> int | None:
        """A number that tells the connection to `addr` from all others, also from one that it was made again as."""
        with self._lock:
            line = self._lines.get(addr)
        return None if line is None else line.made

    def disconnect(self, addresses: Iterable[str]) -> None:
        """Close the lines to these addresses; what is asked on one of them fails."""
        wanted = list(addresses)

        def close() -> None:
            with self._lock:
                gone = [self._lines.pop(one, None) for one in wanted]
            for line in gone:
                if line is not None:
                    line.close()

        # Whom nobody knows any more nobody closes.
        to_its_end(close)

    def keep_only(self, addresses: Set[str]) -> None:
        """Close the lines to all other addresses."""
        with self._lock:
            others = self._lines.keys() - addresses
        self.disconnect(others)

    def close(self) -> None:
        """Close all of them; the workers give up what was claimed through them."""
        self.disconnect(list(self._lines))
        self._crew.end()


class _Line:
    """One connection, which is made when it is first used, and again where it was lost."""

    def __init__(self, addr: str) -> None:
        host, port = split_address(addr)
        self.made: int | None = None
        self._lock = threading.Lock()
        self._connection = Connection(host, port)
        _of_process.add(self)

    def ask(
        self, worker: Worker, request: Request, content: bytes | None, token: str | None, timeout: float
    ) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        deadline = time.monotonic() + timeout
        try:
            with self._lock:
                status, text = self._exchange_again(worker, request, content, headers, deadline)
        finally:
            if self._connection.is_ended:
                self._let_go()
        if status in (_UNAUTHORIZED, _FORBIDDEN):
            shown = (
                ""
                if token is not None
                else "; it was shown none, which only workers are, by the addresses they have"
            )
            raise NotAuthorizedError(
                f"{worker} refuses {request.method} {request.path}: it wants the token that it was served with{shown}"
            )
        return _read(worker, request, status, text)

    def _exchange_again(
        self,
        worker: Worker,
        request: Request,
        content: bytes | None,
        headers: dict[str, str],
        deadline: float,
    ) -> tuple[int, bytes]:
        """The answer on the connection as it is, or on a new one where that was lost."""
        is_kept = self._connection.sock is not None
        try:
            try:
                return self._exchange(request, content, headers, deadline)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self._connection.close()
                # A connection that was kept may have been closed since; what these requests do can be done twice.
                if not is_kept:
                    raise
                return self._exchange(request, content, headers, deadline)
        # A name that cannot be one of a host, too.
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            self._connection.close()
            reason = str(error) or type(error).__name__
            raise NoAnswerError(
                f"{worker} does not answer ({request.method} {request.path}): {reason}; does that process still run?"
            ) from error
        except BaseException:
            # Interrupted in the middle: what comes next on it would be the answer to this.
            self._connection.close()
            raise

    def _exchange(
        self, request: Request, content: bytes | None, headers: dict[str, str], deadline: float
    ) -> tuple[int, bytes]:
        connection = self._connection
        is_new = connection.sock is None
        try:
            return connection.exchange(request.method, request.path, content, headers, deadline)
        finally:
            if is_new:
                self.made = next(_made)

    def close(self) -> None:
        """Now, or as soon as who asks on it has found that out."""
        self._connection.is_ended = True
        self._let_go()

    def _let_go(self) -> None:
        # Who has the lock comes here when he gives it back.
        if self._lock.acquire(blocking=False):
            try:
                self._connection.close()
            finally:
                self._lock.release()

    def leave_to_parent(self) -> None:
        """In a child made by `fork`, whose only thread this is: let go of the copy of the parent's connection."""
        self._lock = threading.Lock()
        connection = self._connection
        sock, connection.sock = connection.sock, None
        if sock is not None:
            # Not `close`, which waits for answers that are being read.
            os.close(sock.detach())
        connection.close()


# The workers take the end of a connection for that of the controller, which a copy in a child would hide.
_of_process: weakref.WeakSet[_Line] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for line in list(_of_process):
        line.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class NoAnswerError(TransferError):
    """No answer came from there, or none in time."""


def _joined(one: Any, other: Any) -> Any:
    """Of the answers to two such requests: sums of counts, lists one after the other."""
    return one + other if isinstance(one, (int, list)) else other


def _read(worker: Worker, request: Request, status: int, text: bytes) -> Any:
    try:
        answer = json.loads(text) if text else None
    # What lies in a thousand lists is none of theirs.
    except (ValueError, RecursionError):
        answer = None
    if status >= _WRONG:
        reason = answer.get("message", "") if isinstance(answer, dict) else text.decode(errors="replace")
        raise TransferError(
            f"{worker} refuses {request.method} {request.path} ({status}): {str(reason)[:_LONGEST_REASON]}"
        )
    if status != _OK or not isinstance(answer, dict) or not answer:
        # A proxy, say, that is content with everything: it has drained nothing.
        shown = text.decode(errors="replace")[:_LONGEST_SHOWN]
        raise TransferError(
            f"{worker} answers {request.method} {request.path} with {status} {shown!r}: what serves there is no "
            "process of tundish"
        )
    return answer
