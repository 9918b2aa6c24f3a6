"""The messages between a pool and its workers: tasks and answers on the queue, everything else on a socket.

A message on the queue has a kind and a payload. A plain value (a number, a short text) is its own payload. Other values
are pickled with protocol 5, and large buffers lie beside the pickle (PEP 574). If the pickle is larger than a payload,
or a buffer has `LARGE_BYTES` or more, both go to shared memory, and the payload is a reference. So an array is copied
once. Pickles never leave the processes of a pool.

All workers share one end of the socket. A worker reports that it is ready, or why it cannot start. It also sends the
descriptor of the memory in which its results lie, so the parent can open a finished result of a dead worker. When the
parent's end is closed everywhere, each worker ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import traceback
import weakref
from array import array
from collections.abc import Callable, Sequence
from pickle import dumps, loads
from typing import Any, Final, NamedTuple

from tundish import _native
from tundish.errors import NotPicklableError, OutOfMemoryError, StorageError, format_type

# Kinds of tasks and of their answers: one item or result, or a list of them.
SINGLE: Final = 0
CHUNK: Final = 2
# Added to a kind: the payload refers to shared memory; the answer is an error; the list goes on after an error.
IN_BUFFER: Final = 1
ERROR: Final = 4
GO_ON: Final = 16
# Never on the queue: the answer is an exception that the parent made.
PARENT_ERROR: Final = 8

# Slots of the task queue. Few slots stay in the processor's cache if few are used.
SLOTS: Final = 512
SLOT_BYTES: Final = 16 * 1024

MAX_PAYLOAD_BYTES: Final = SLOT_BYTES - 64
PICKLE_PROTOCOL: Final = 5
# A smaller buffer is copied into the pickle and out of it, which costs less than shared memory.
LARGE_BYTES: Final = 64 * 1024

_ALIGNMENT = 64

# The pickle of an exception (None if it cannot be pickled), its message in one line, and its traceback.
PackedError = tuple[bytes | None, str, str]


class RemoteTraceback(Exception):
    """The traceback in the worker: the cause of the exception that the parent raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class BufferMessage:
    """A message in shared memory. It outlives the process that sent it."""

    __slots__ = ("_table_bytes", "_view", "nbytes")

    def __init__(self, view: memoryview, table_bytes: int) -> None:
        self.nbytes = view.nbytes
        self._view = view
        self._table_bytes = table_bytes

    def value(self) -> Any:
        """Return the value. Its arrays are views of the memory, which is freed with the last of them."""
        stream, lengths = loads(self._view[: self._table_bytes])
        starts, _ = _buffer_offsets(self._table_bytes, lengths)
        buffers = [self._view[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        return loads(stream, buffers=buffers)

    def copied(self) -> BufferMessage:
        """Return a copy of the message in private memory."""
        return BufferMessage(memoryview(bytearray(self._view)), self._table_bytes)


class MessagePacker:
    """Packs values into payloads and buffers, and opens the buffers of other processes.

    Args:
        on_new_segment: called with the first buffer in each segment of this packer.
    """

    def __init__(self, on_new_segment: Callable[[_native.SendBuffer], None] | None = None) -> None:
        self.receiver = _native.BufferReceiver()
        self._on_new_segment = on_new_segment
        self._known_segments: set[int] = set()
        self._arena: _native.SegmentArena | None = None

    def pack(self, value: Any) -> tuple[int, Any, _native.SentBuffer | None]:
        """Pack `value`.

        Returns:
            `IN_BUFFER` or 0, the payload, and the lease of the buffer that the payload refers to. The buffer is revoked
            when the lease is dropped.

        Raises:
            NotPicklableError: `value` cannot be pickled.
            OutOfMemoryError: there is no room for the buffer.
        """
        if _native.is_plain(value, MAX_PAYLOAD_BYTES):
            return 0, value, None
        large: list[memoryview] = []
        stream = _pickled(value, large)
        if not large and len(stream) <= MAX_PAYLOAD_BYTES:
            return 0, stream, None
        lengths = [value.nbytes for value in large]
        table = dumps((stream, lengths), PICKLE_PROTOCOL)
        starts, end = _buffer_offsets(len(table), lengths)
        if self._arena is None:
            self._arena = _native.SegmentArena()
        buffer = self._arena.take(end)
        with memoryview(buffer) as room:
            room[: len(table)] = table
            for start, one in zip(starts, large, strict=True):
                room[start : start + one.nbytes] = one
        lease = _native.SentBuffer(buffer)
        identity = lease.reference[2]
        if self._on_new_segment is not None and identity not in self._known_segments:
            self._on_new_segment(buffer)
            self._known_segments.add(identity)
        return IN_BUFFER, dumps((lease.reference, len(table)), PICKLE_PROTOCOL), lease

    def open(self, payload: bytes) -> BufferMessage:
        """Open the buffer to which `payload` refers. A buffer can be opened once."""
        reference, table_bytes = loads(payload)
        return BufferMessage(memoryview(self.receiver.open(reference)), table_bytes)

    def release_after_fork(self) -> None:
        """In a child made by `fork`: drop the memory that is kept for the next messages."""
        self._arena = None
        self.receiver = _native.BufferReceiver()


def pack_error(error: BaseException, packer: MessagePacker) -> tuple[int, Any, _native.SentBuffer | None]:
    """Pack the error of a task and its traceback. Returns what `MessagePacker.pack` does."""
    packed = packed_error(error)
    try:
        flag, payload, lease = packer.pack(packed)
    except Exception:  # noqa: BLE001 (every task is answered)
        # There is not enough memory; the end of a traceback says most.
        _, summary, text = packed
        flag, payload, lease = packer.pack((None, summary[:1000], text[-4000:]))
    return ERROR | flag, payload, lease


def packed_error(error: BaseException) -> PackedError:
    """Convert an exception for `unpack_error` in another process."""
    summary = _summary_of(error)
    try:
        stream: bytes | None = dumps(error, PICKLE_PROTOCOL)
    except Exception as failure:  # noqa: BLE001 (code of users)
        stream, summary = None, f"{summary} ({_summary_of(failure)})"
    return stream, summary, "".join(traceback.format_exception(error))


def unpack(kind: int, payload: Any) -> tuple[Any, BaseException | None]:
    """Unpack an answer.

    Args:
        kind: kind of the answer, with its flags, or `PARENT_ERROR`.
        payload: bytes or a plain value, with `IN_BUFFER` a `BufferMessage`, with `PARENT_ERROR` the exception itself.

    Returns:
        The value and None, or None and the exception in its place.
    """
    if kind == PARENT_ERROR:
        return None, payload
    if kind == SINGLE and type(payload) is not bytes:
        return payload, None
    try:
        value = payload.value() if kind & IN_BUFFER else loads(payload)
    except Exception as error:  # noqa: BLE001 (code of users)
        failure = NotPicklableError(f"a result came but cannot be unpickled here: {_summary_of(error)}")
        failure.__cause__ = error
        return None, failure
    if kind & ERROR:
        return None, unpack_error(value)
    return value, None


def unpack_error(packed: PackedError) -> BaseException:
    """Return the exception of `packed_error`. Its cause is the worker's traceback."""
    stream, summary, text = packed
    error: Any = None
    if stream is not None:
        try:
            error = loads(stream)
        except Exception as failure:  # noqa: BLE001 (code of users)
            summary = f"{summary} ({_summary_of(failure)})"
    if not isinstance(error, BaseException):
        error = NotPicklableError(
            f"a task raised an exception that cannot be sent between processes: {summary}; "
            "its traceback in the worker is shown as this error's cause"
        )
    # Its class may forbid that attributes are set.
    BaseException.__setattr__(error, "__cause__", RemoteTraceback(text))
    return error  # type: ignore[no-any-return]  # checked above


def check_picklable(value: Any) -> None:
    """Raise `NotPicklableError` unless `value` can be pickled."""
    _pickled(value, [])


def _pickled(value: Any, buffers: list[memoryview]) -> bytes:
    """Pickle `value`, and append its large buffers to `buffers`."""

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True
        if raw.nbytes < LARGE_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        # There is no tensor if torch is not imported.
        if "torch" in sys.modules:
            from tundish.shm.tensor_conversion import dumps_with_tensors

            return dumps_with_tensors(value, PICKLE_PROTOCOL, buffer_callback=is_small)
        return dumps(value, PICKLE_PROTOCOL, buffer_callback=is_small)
    except MemoryError:
        raise
    except Exception as error:
        raise NotPicklableError(
            f"{format_type(value)} cannot be sent between processes: {_summary_of(error)}"
        ) from error


def _buffer_offsets(table_bytes: int, lengths: list[int]) -> tuple[list[int], int]:
    """Return the offsets of the buffers behind the table, and the end of the last one."""
    starts, end = [], table_bytes
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + length
    return starts, end


def _summary_of(error: BaseException) -> str:
    # It also handles exceptions whose `__str__` fails.
    return "".join(traceback.format_exception_only(error)).strip()


READY: Final = "ready"
FAILED: Final = "failed"
MEMORY: Final = "memory"

_MAX_TEXT_BYTES = 16 * 1024
_MAX_MESSAGE_BYTES = 8 * _MAX_TEXT_BYTES
# An open result takes two mappings and a descriptor. Further results are copied to private memory.
_MAX_SHARED_RESULTS: Final = 128


class WorkerMessage(NamedTuple):
    """A message from a worker: `what` is `READY`, `FAILED` with a text, or `MEMORY` with a descriptor."""

    what: str
    worker: int
    pid: int
    text: str


def send_to_parent(
    control: int, what: str, worker: int, text: str = "", descriptors: Sequence[int] = ()
) -> None:
    """Send a message on the workers' end, whose descriptor is `control`."""
    text = text.encode(errors="replace")[-_MAX_TEXT_BYTES:].decode(errors="replace")
    message = pickle.dumps(tuple(WorkerMessage(what, worker, os.getpid(), text)))
    # If the parent has ended, a watcher thread ends this process.
    with (
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
        socket.socket(fileno=os.dup(control)) as end,
    ):
        socket.send_fds(end, [message], list(descriptors))


class WorkerMessages:
    """Both ends of the socket, in the parent. `packer` opens the buffers of workers."""

    def __init__(self, packer: MessagePacker) -> None:
        self._parents_end, self._workers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._packer = packer
        self._lock = threading.Lock()
        self._received: list[WorkerMessage] = []
        _sockets.add(self)

    @property
    def workers_end(self) -> int:
        """The descriptor that workers inherit."""
        return self._workers_end.fileno()

    def fileno(self) -> int:
        """Return the descriptor that is readable when a worker has sent a message."""
        return self._parents_end.fileno()

    def messages(self) -> list[WorkerMessage]:
        """Return the messages that workers have sent since the last call."""
        self._receive()
        with self._lock:
            received, self._received = self._received, []
        return received

    def open_buffer(self, payload: Any) -> BufferMessage:
        """Open the buffer to which the payload of an answer refers. A buffer can be opened once."""
        try:
            message = self._packer.open(payload)
        except OSError:
            # Its worker is dead, and its last messages may not be received yet.
            self._receive()
            message = self._packer.open(payload)
        return message.copied() if self._packer.receiver.views > _MAX_SHARED_RESULTS else message

    def forget(self, pid: int) -> None:
        """Release the memory of a dead worker, after its last results were opened."""
        self._packer.receiver.forget(pid)

    def close(self) -> None:
        """Close both ends. Workers that are alive end."""
        self._parents_end.close()
        self._workers_end.close()

    def release_after_fork(self) -> None:
        """In a child made by `fork`, such as a worker: keep neither workers nor memory alive."""
        self._parents_end.close()
        self._packer.release_after_fork()

    def _receive(self) -> None:
        with self._lock:
            while (received := _receive(self._parents_end)) is not None:
                message, descriptors = received
                for descriptor in descriptors:
                    # If no descriptor or memory is left, the buffer is opened through its worker, or fails there.
                    with contextlib.suppress(StorageError, OutOfMemoryError):
                        self._packer.receiver.adopt(descriptor, message.pid)
                if message.what != MEMORY:
                    self._received.append(message)


_sockets: weakref.WeakSet[WorkerMessages] = weakref.WeakSet()


def _release_all_after_fork() -> None:
    for control in list(_sockets):
        control.release_after_fork()


os.register_at_fork(after_in_child=_release_all_after_fork)


def _receive(end: socket.socket) -> tuple[WorkerMessage, list[int]] | None:
    """Return the next message and its descriptors; None if there is none."""
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    descriptors = array("i")
    try:
        # `socket.recv_fds` ignores its flags.
        text, attached, _, _ = end.recvmsg(_MAX_MESSAGE_BYTES, socket.CMSG_SPACE(descriptors.itemsize), flags)
    except OSError:
        return None
    if not text:
        return None
    for _, _, content in attached:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    # The message is of a worker of this program.
    return WorkerMessage(*pickle.loads(text)), list(descriptors)
