"""The socket for messages of workers other than results. By it, workers also see their parent end.

All workers share one end of it. A worker says when it is ready, why it cannot start, and in which memory its results
lie: it sends the descriptor, so that a finished result can be opened though its worker is dead. When the parent's end
is closed everywhere, the kernel tells each worker, which ends.
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

__all__ = ["FAILED", "MEMORY", "READY", "ControlSocket", "MessageFromWorker", "send_to_parent"]

READY: Final = "ready"
FAILED: Final = "failed"
MEMORY: Final = "memory"

_LONGEST_TEXT = 16 * 1024
_LONGEST_MESSAGE = 8 * _LONGEST_TEXT
# A result takes two mappings, and its memory a descriptor. More of them are copied to memory of this process's own, and
# the shared memory is used again at once.
_MOST_SHARED_RESULTS: Final = 128


class MessageFromWorker(NamedTuple):
    """A message from a worker: `what` is `READY`, `FAILED` with a text, or `MEMORY` with a descriptor."""

    what: str
    worker: int
    pid: int
    text: str


def send_to_parent(
    control: int, what: str, worker: int, text: str = "", descriptors: Sequence[int] = ()
) -> None:
    """Send a message on the workers' end, whose descriptor is `control`."""
    text = text.encode(errors="replace")[-_LONGEST_TEXT:].decode(errors="replace")
    message = pickle.dumps(tuple(MessageFromWorker(what, worker, os.getpid(), text)))
    # If the parent is gone, the watcher ends this process.
    with (
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
        socket.socket(fileno=os.dup(control)) as end,
    ):
        socket.send_fds(end, [message], list(descriptors))


class ControlSocket:
    """Both ends, in the parent. `packer` opens the buffers of workers."""

    def __init__(self, packer: MessagePacker) -> None:
        self._parents_end, self._workers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._packer = packer
        self._lock = threading.Lock()
        self._received: list[MessageFromWorker] = []
        _sockets.add(self)

    @property
    def workers_end(self) -> int:
        """The descriptor that workers inherit."""
        return self._workers_end.fileno()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a worker has sent something."""
        return self._parents_end.fileno()

    def messages(self) -> list[MessageFromWorker]:
        """Return the messages that workers have sent since the last call."""
        self._receive()
        with self._lock:
            received, self._received = self._received, []
        return received

    def open_buffer(self, payload: Any) -> BufferMessage:
        """Open the buffer that the payload of an answer refers to; once."""
        try:
            message = self._packer.open(payload)
        except OSError:
            # Its worker is dead, and its last messages may not have been received yet.
            self._receive()
            message = self._packer.open(payload)
        return message.copied() if self._packer.receiver.views > _MOST_SHARED_RESULTS else message

    def forget(self, pid: int) -> None:
        """Let go of the memory of a dead worker, after its last results were opened."""
        self._packer.receiver.forget(pid)

    def close(self) -> None:
        """Close both ends: workers that live end."""
        self._parents_end.close()
        self._workers_end.close()

    def disown(self) -> None:
        """In a child made by `fork`, workers among them: hold nothing that keeps workers or memory alive."""
        self._parents_end.close()
        self._packer.disown()

    def _receive(self) -> None:
        with self._lock:
            while (received := _receive(self._parents_end)) is not None:
                message, descriptors = received
                for descriptor in descriptors:
                    # Without a descriptor or memory left, the memory is looked for at its worker, or is an error.
                    with contextlib.suppress(StorageError, OutOfMemoryError):
                        self._packer.receiver.adopt(descriptor, message.pid)
                if message.what != MEMORY:
                    self._received.append(message)


_sockets: weakref.WeakSet[ControlSocket] = weakref.WeakSet()


def _disown_all() -> None:
    for control in list(_sockets):
        control.disown()


os.register_at_fork(after_in_child=_disown_all)


def _receive(end: socket.socket) -> tuple[MessageFromWorker, list[int]] | None:
    """The next message and its descriptors; None if there is none."""
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    descriptors = array("i")
    try:
        # `socket.recv_fds` passes no flags on.
        text, attached, _, _ = end.recvmsg(_LONGEST_MESSAGE, socket.CMSG_SPACE(descriptors.itemsize), flags)
    except OSError:
        return None
    if not text:
        return None
    for _, _, content in attached:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    # The worker is this program's own.
    return MessageFromWorker(*pickle.loads(text)), list(descriptors)
