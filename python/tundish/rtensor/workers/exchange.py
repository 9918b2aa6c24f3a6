"""A connection on which a request and its answer together have a deadline, and a size that they do not pass.

What always holds: nobody waits beyond the deadline, however little comes each time, nor for long after another thread
has ended the connection; of what comes no more is kept than an answer may have.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import os
import select
import socket
import time
from typing import Any

from tundish.waiting import Moment, Thread

__all__ = ["Connection"]

LONGEST_ANSWER = 64 << 20
# Of its head, with answers before it that only say that it follows.
_LONGEST_HEAD = 1 << 20
_PIECE = 1 << 20
# Between two looks at whether the connection was ended.
_TURN_SECONDS = 0.25


class Connection(http.client.HTTPConnection):
    """As Python has it, with a deadline for what is done at the moment."""

    deadline = 0.0
    # Bytes that may come still.
    room = 0
    # By another thread, perhaps: from then on nothing is exchanged.
    is_ended = False

    def exchange(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str], deadline: float
    ) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `OSError` and `HTTPException`."""
        self.deadline, self.room = deadline, _LONGEST_HEAD
        if self.sock is None:
            self.connect()
        self.request(method, path, content, headers)
        response = self.getresponse()
        self.room += LONGEST_ANSWER
        text = bytearray()
        while piece := response.read(_PIECE):
            text += piece
            if len(text) > LONGEST_ANSWER:
                raise http.client.HTTPException(f"the answer is longer than {LONGEST_ANSWER} bytes")
        return response.status, bytes(text)

    def connect(self) -> None:
        """To the first of the host's addresses that answers before the deadline."""
        failure: OSError = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, address in self._addresses():
            made = socket.socket(family, kind, protocol)
            try:
                made.setblocking(False)
                failed = made.connect_ex(address)
                if failed in (errno.EINPROGRESS, errno.EINTR):
                    self.wait(made, select.POLLOUT)
                    failed = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    raise OSError(failed, os.strerror(failed))
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                failure = error
                made.close()
            except BaseException:
                made.close()
                raise
            else:
                # What a connection asks of its socket: to send all, to be read as a file, to be closed.
                self.sock = _Socket(made, self)
                return
        raise failure

    def _addresses(self) -> list[Any]:
        """Of the host, whose name another thread looks up: nothing calls that off."""
        host, port, kind = self.host, self.port, socket.SOCK_STREAM
        with contextlib.suppress(socket.gaierror):
            return socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
        found: list[Any] = []
        failures: list[Exception] = []
        over = Moment()

        def look_up() -> None:
            try:
                found.extend(socket.getaddrinfo(host, port, type=kind))
            except Exception as error:  # noqa: BLE001 (raised again where it is waited for)
                failures.append(error)
            finally:
                over.come()

        try:
            Thread(look_up, "tundish-rtensor-resolve").start()
        except RuntimeError:
            # The system has no thread left.
            look_up()
        while not over.wait(self._turn()):
            pass
        for failure in failures:
            raise failure
        return found

    def wait(self, made: socket.socket, event: int) -> None:
        """Until there is something to be done on a socket. Raises `TimeoutError` and `ConnectionAbortedError`."""
        poll = select.poll()
        poll.register(made, event)
        while not poll.poll(self._turn() * 1000):
            pass

    def _turn(self) -> float:
        """Seconds to wait before this is asked again. Raises as `wait` does."""
        if self.is_ended:
            raise ConnectionAbortedError("the connection was closed here")
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return min(left, _TURN_SECONDS)


class _Socket:
    """A socket whose every call ends at the deadline of its connection."""

    def __init__(self, made: socket.socket, connection: Connection) -> None:
        self._socket = made
        self._connection = connection

    def sendall(self, content: Any) -> None:
        left = memoryview(content)
        while left:
            self._connection.wait(self._socket, select.POLLOUT)
            with contextlib.suppress(BlockingIOError):
                left = left[self._socket.send(left) :]

    def makefile(self, *_: Any) -> io.BufferedReader:
        # The file keeps the socket open until it is closed, too.
        return io.BufferedReader(_Incoming(self._socket, self._connection))

    def close(self) -> None:
        self._socket.close()

    def detach(self) -> int:
        return self._socket.detach()


class _Incoming(io.RawIOBase):
    """What comes on a socket."""

    def __init__(self, made: socket.socket, connection: Connection) -> None:
        self._socket = made
        self._file = made.makefile("rb", buffering=0)
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int | None:
        come = None
        while come is None:
            self._connection.wait(self._socket, select.POLLIN)
            come = self._file.readinto(room)
        self._connection.room -= come
        if self._connection.room < 0:
            raise http.client.HTTPException("more comes than an answer may have")
        return come

    def close(self) -> None:
        self._file.close()
        super().close()
