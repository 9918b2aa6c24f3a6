"""A worker: it takes tasks off the board, runs them, and answers.

Owns the loop of one worker process. What always holds:

1. Every task that is taken is answered, whatever it returns or raises, unless the process dies.
2. The process ends when its pool's parent does, even in the middle of a task: a thread of the compiled module
   watches, which needs no GIL.
3. Ctrl-C is the parent's business: workers ignore it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tundish import _native
from tundish.errors import NotPicklableError
from tundish.shm.pool import messages
from tundish.shm.pool.messages import CHUNK, IN_PARCEL, ITEM, VALUE, VALUES, Courier, loads

__all__ = ["FAILED", "MEMORY", "READY", "Call", "Link", "Saying", "hear", "serve"]

# What a worker says to the parent beside the board.
READY: Final = b"R"
FAILED: Final = b"F"
# Its results come in the memory whose descriptor is sent along, which so outlives it.
MEMORY: Final = b"M"
_HEADER = struct.Struct("=cII")
_LONGEST_TEXT = 16 * 1024
_ONE_DESCRIPTOR = socket.CMSG_SPACE(struct.calcsize("i"))

Call = Callable[[Any], Any]
# Kind, payload, and the parcel that the payload refers to.
_Answer = tuple[int, Any, _native.SendBuffer | None]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a worker has of its parent: descriptors, and the parent's process id."""

    worker: int
    board: int
    lifeline: int
    voice: int
    parent: int
    room: int


@dataclass(frozen=True, kw_only=True)
class Saying:
    """What a worker said."""

    what: bytes
    worker: int
    pid: int
    text: str
    descriptors: list[int]


def _say(link: Link, what: bytes, text: str = "", descriptors: Sequence[int] = ()) -> None:
    message = _HEADER.pack(what, link.worker, os.getpid()) + text.encode(errors="replace")[-_LONGEST_TEXT:]
    # A parent that is gone hears nothing: the watcher ends this process.
    with (
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
        socket.socket(fileno=os.dup(link.voice)) as line,
    ):
        socket.send_fds(line, [message], list(descriptors))


def hear(line: socket.socket) -> Saying | None:
    """The next thing that a worker said, if there is one."""
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        # Not `socket.recv_fds`, which passes no flags on.
        message, attached, _, _ = line.recvmsg(_HEADER.size + _LONGEST_TEXT, _ONE_DESCRIPTOR, flags)
    except OSError:
        return None
    if not message:
        return None
    descriptors = array("i")
    for _, _, content in attached:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    what, worker, pid = _HEADER.unpack_from(message)
    text = message[_HEADER.size :].decode(errors="replace")
    return Saying(what=what, worker=worker, pid=pid, text=text, descriptors=list(descriptors))


def serve(link: Link, bind: Callable[[], Call]) -> None:
    """Be a worker until the parent says that it is over; `bind` brings the function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _native.end_with(link.lifeline, link.parent)
    try:
        call = bind()
    except Exception as error:  # noqa: BLE001 (told to the parent)
        _, summary, text = messages.describe_error(error)
        _say(link, FAILED, f"{summary}\n{text}")
        raise SystemExit(1) from None
    board = _native.TaskQueue.open(link.board)
    courier = Courier(link.room, lambda parcel: _say(link, MEMORY, descriptors=[parcel.descriptor]))
    _say(link, READY)
    _work(call, board, link.worker, courier)


def _work(call: Call, board: _native.TaskQueue, worker: int, courier: Courier) -> None:
    take, finish_plain = board.take, board.finish_plain
    while (task := take(worker, None)) is not None:
        ticket, kind, payload = task
        if kind == ITEM and type(payload) is not bytes:
            # Most tasks where there are many: what is plain is not pickled, and told with one call.
            try:
                value = call(payload)
            except BaseException as error:  # noqa: BLE001 (the task's)
                answer, content, parcel = messages.pack_error(error, courier)
            else:
                if finish_plain(ticket, VALUE, value):
                    continue
                answer, content, parcel = _packed(value, courier)
                del value
        else:
            answer, content, parcel = _answer(call, kind, payload, courier)
        board.finish(ticket, answer, content)
        if parcel is not None:
            parcel.release()
        # While it waits, a worker keeps nothing of what it worked on but plain values.
        del task, payload, content, parcel


def _answer(call: Call, kind: int, payload: Any, courier: Courier) -> _Answer:
    try:
        content = courier.open(payload).copied_value() if kind & IN_PARCEL else loads(payload)
        if kind & CHUNK:
            return _run_chunk(call, content, courier)
        value = call(content)
    except BaseException as error:  # noqa: BLE001 (the task's)
        return messages.pack_error(error, courier)
    return _packed(value, courier)


def _packed(value: Any, courier: Courier) -> _Answer:
    try:
        flag, payload, parcel = courier.pack(value)
    except BaseException as error:  # noqa: BLE001 (the task's)
        return messages.pack_error(error, courier)
    return VALUE | flag, payload, parcel


def _run_chunk(call: Call, items: list[Any], courier: Courier) -> _Answer:
    results: list[Any] = []
    failure = None
    began = time.perf_counter()
    try:
        for item in items:
            results.append(call(item))  # noqa: PERF401 (those before an error are results)
    except BaseException as error:  # noqa: BLE001 (the task's)
        failure = messages.describe_error(error)
    seconds = time.perf_counter() - began
    try:
        flag, stream, parcel = courier.pack((seconds, results, failure))
    except NotPicklableError:
        results, failure = _sendable(results)
        flag, stream, parcel = courier.pack((seconds, results, failure))
    return VALUES | flag, stream, parcel


def _sendable(results: list[Any]) -> tuple[list[Any], tuple[bytes | None, str, str] | None]:
    """The results before the first that cannot be pickled, and what to say of that one."""
    for place, result in enumerate(results):
        try:
            messages.check_picklable(result)
        except NotPicklableError as error:
            return results[:place], messages.describe_error(error)
    return results, None
