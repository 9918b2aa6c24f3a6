"""The socket on which workers send everything but results, and notice the end of their parent.

All workers share one end. A worker reports that it is ready, or why it cannot start. It also sends the descriptor of
the memory in which its results lie, so the parent can open a finished result of a dead worker. When the parent's end is
closed everywhere, each worker ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import weakref
from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tundish.errors import OutOfMemoryError, StorageError
from tundish.shm.pool.messages import BufferMessage, MessagePacker

__all__ = ["FAILED", "MEMORY", "READY", "WorkerMessage", "WorkerMessages", "send_to_parent"]

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
