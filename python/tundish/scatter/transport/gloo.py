"""Batches to ranks of other nodes: messages of a gloo group that belongs to the scatter alone.

A batch is two messages, or three where its schema is long: header and schema, then all tensors as one buffer.

Invariants:
- gloo never ends a wait by itself, as that would end the connection too. Sessions have timeouts of their own, and a
  late rank still finds the messages.
- All messages of a step are posted before any of them is waited for. Tensors are sent from a copy, so the caller may
  change a batch as soon as the call returns or fails.
- gloo's waits cannot be interrupted: only a `DaemonThread` is in one.
"""

from __future__ import annotations

import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tundish import _native
from tundish.daemon_thread import DaemonThread, is_done
from tundish.scatter.batch_bytes import IncomingBatch, OutgoingBatch, bytes_of, decode_schema
from tundish.scatter.transport.message import (
    DEVICE,
    HEADER_BYTES,
    MAX_LEASES,
    IncomingMessage,
    MessageHeader,
    MessageKind,
)

_FOREVER = timedelta(days=365)
# The first message: the header, and the text if it fits. gloo takes hardly longer for it than for one byte.
_FIRST_BYTES = 4096
_TAG = 0


def copy_to_arena(batch: OutgoingBatch, arena: _native.SegmentArena) -> Tensor | None:
    """The bytes of a batch in memory that is used again once gloo has sent it; None for a batch without tensors."""
    if not batch.size:
        return None
    buffer = arena.take(batch.size)
    try:
        batch.write(buffer)
        return torch.from_numpy(bytes_of(buffer)[: batch.size])
    finally:
        # The buffer lives as long as the tensor over it.
        buffer.release()


@dataclass(frozen=True)
class GlooSender:
    """The connection to one receiver.

    Attributes:
        rank: the receiver's global rank.
        group: the backend of a gloo group whose first rank is this one.
        position: the receiver's rank in that group.
    """

    rank: int
    group: Any
    position: int


class OutgoingMessages:
    """Messages that gloo is sending. `post` all of them, then have a `DaemonThread` `wait` for them.

    Attributes:
        waiting_for: the rank whose messages `wait` is waiting for.
        errors: by rank, why its messages could not be sent.
        sent_bytes: bytes of batches that are sent.
    """

    def __init__(self) -> None:
        self.waiting_for: int | None = None
        self.errors: dict[int, Exception] = {}
        self.sent_bytes = 0
        self._posted: deque[tuple[int, list[Any], list[Tensor]]] = deque()

    def post(
        self, sender: GlooSender, header: MessageHeader, text: bytes, payload: Tensor | None = None
    ) -> None:
        """Begin to send one receiver a text, or a batch with its schema as the text.

        `payload`: the bytes of the batch, shape (size,), uint8; None where they travel from device to device.
        """
        first = header._replace(text_bytes=len(text)).pack()
        fits = len(first) + len(text) <= _FIRST_BYTES
        contents = [first + text] if fits else [first, text]
        contents[0] = contents[0].ljust(_FIRST_BYTES, b"\0")
        messages = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
        if payload is not None:
            messages.append(payload)
        try:
            # The messages have to live until the works are done.
            works = [sender.group.send([message], sender.position, _TAG) for message in messages]
            self._posted.append((sender.rank, works, messages))
        except Exception as error:  # noqa: BLE001 (the other receivers get theirs)
            self.errors[sender.rank] = error

    def wait(self) -> None:
        """Wait until all messages are sent, and drop them."""
        while self._posted:
            self.waiting_for, works, messages = self._posted.popleft()
            try:
                for work in works:
                    work.wait(_FOREVER)
                self.sent_bytes += sum(message.numel() for message in messages[1:])
            except Exception as error:  # noqa: BLE001 (as above)
                self.errors[self.waiting_for] = error


class GlooReceiver:
    """Receives from the source, the first rank of a gloo group.

    Args:
        group: the backend of the group.
        thread: waits for messages.
        arena: memory for batches that is used again.
        passes_on: whether other ranks of this node get their batches from this rank.
    """

    def __init__(
        self, group: Any, thread: DaemonThread, arena: _native.SegmentArena, *, passes_on: bool
    ) -> None:
        self._group = group
        self._thread = thread
        self._arena = arena
        self._passes_on = passes_on
        self._message: Future[IncomingMessage] | None = None
        # Memory of the arena that holds batches of this rank.
        self._held: list[weakref.ref[Any]] = []

    def wait(self, seconds: float) -> bool:
        """Whether a message came within so many seconds, or an error."""
        if self._message is None:
            self._message = self._thread.submit(self._receive)
        return is_done(self._message, seconds)

    def read(self) -> IncomingMessage:
        """The message that `wait` found.

        Raises:
            RuntimeError: the connection is broken.
                OutOfMemoryError, StorageError: there is no memory for the batch. No other message can be read.
        """
        if self._message is None:
            raise RuntimeError("read() was called before wait() found a message")
        message, self._message = self._message, None
        return message.result()

    def close(self) -> None:
        """Do nothing: `Channels.close` destroys the group."""

    def _receive(self) -> IncomingMessage:
        first = self._receive_into(np.empty(_FIRST_BYTES, np.uint8))
        header = MessageHeader.unpack(first[:HEADER_BYTES].tobytes())
        text = first[HEADER_BYTES : HEADER_BYTES + header.text_bytes]
        if len(text) < header.text_bytes:
            text = self._receive_into(np.empty(header.text_bytes, np.uint8))
        if header.kind != MessageKind.BATCH:
            return IncomingMessage(header, text.tobytes().decode(errors="replace"))
        if self._passes_on:
            # Others read the schema behind the tensors.
            buffer = self._arena.take(header.size + header.text_bytes)
            everything = bytes_of(buffer)
            everything[header.size : header.size + header.text_bytes] = text
            memory = self._receive_into(everything[: header.size]).copy() if header.size else None
            return IncomingMessage(header, IncomingBatch(decode_schema(text), memory), buffer)
        on_host = header.size and not header.flags & DEVICE
        memory = self._receive_into(self._memory_for(header.size)) if on_host else None
        return IncomingMessage(header, IncomingBatch(decode_schema(text), memory))

    def _memory_for(self, size: int) -> NDArray[np.uint8]:
        self._held = [held for held in self._held if held() is not None]
        if size < _FIRST_BYTES or len(self._held) >= MAX_LEASES:
            return np.empty(size, np.uint8)
        buffer = self._arena.take(size)
        everything = bytes_of(buffer)
        # It is used again when the batch is freed.
        buffer.release()
        self._held.append(weakref.ref(everything.base))
        return everything[:size]

    def _receive_into(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        self._group.recv([torch.from_numpy(memory)], 0, _TAG).wait(_FOREVER)
        return memory
