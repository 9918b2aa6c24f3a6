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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

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
    ChannelBrokenError,
    Content,
    IncomingMessage,
    MessageHeader,
    MessageKind,
    Text,
    Wait,
)

_FOREVER = timedelta(days=365)
# The first message: the header, and the text if it fits. gloo takes hardly longer for it than for one byte.
_FIRST_BYTES = 4096
_TAG = 0


class GlooSender:
    """Sends to ranks of other nodes, from the first rank of a gloo group: a `Sender`.

    Args:
        group: the backend of the group, whose other ranks are `ranks`.
        ranks: their global ranks.
        thread: waits for messages.
        arena: memory for batches that is used again.
        limit: bytes of batches that may be on their way.
    """

    name: Final = "gloo"

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        thread: DaemonThread,
        arena: _native.SegmentArena,
        limit: int,
    ) -> None:
        self.ranks = ranks
        self.sent_bytes = 0
        self._group = group
        self._thread = thread
        self._arena = arena
        self._limit = limit
        # The messages that were posted last, and the wait for them.
        self._posted: tuple[OutgoingMessages, Future[None]] | None = None

    def send(
        self,
        step: int,
        contents: Mapping[int, Content],
        waiting: set[int],
        wait: Wait,
        *,
        is_on_device: bool = False,
    ) -> None:
        """Begin to send, at once at most as many bytes as the limit; with `is_on_device` without the tensors."""
        payloads: dict[int, Tensor | None] = {}
        copied_bytes = 0
        outgoing, flags = OutgoingMessages(self._group), DEVICE * is_on_device
        try:
            for position, rank in enumerate(self.ranks, 1):
                content = contents[rank]
                if isinstance(content, Text):
                    header, text = MessageHeader(step, content.kind, flags), _encode(content)
                else:
                    if id(content) not in payloads and not is_on_device:
                        if copied_bytes and copied_bytes + content.size > self._limit:
                            self._finish_in_thread(outgoing)
                            outgoing, payloads, copied_bytes = OutgoingMessages(self._group), {}, 0
                            self.finish(wait)
                        copied_bytes += content.size
                        payloads[id(content)] = self._copy(content)
                    header = MessageHeader(step, MessageKind.BATCH, flags, size=content.size)
                    text = content.encoded_schema
                # Before they are posted: a rank that may have them hears of an error in the next step.
                waiting.discard(rank)
                outgoing.post(rank, position, header, text, payloads.get(id(content)))
        finally:
            self._finish_in_thread(outgoing)

    def finish(self, wait: Wait) -> None:
        if self._posted is None:
            return
        outgoing, future = self._posted
        wait(lambda seconds: is_done(future, seconds), lambda: outgoing.waiting_for)
        self.sent_bytes += outgoing.sent_bytes
        for rank, error in outgoing.errors.items():
            raise ChannelBrokenError(rank, f"could not be sent its batch ({error})") from error

    def tell(
        self,
        steps: Mapping[int, int],
        message: Text,
        wait: Wait,  # noqa: ARG002 (as each `Sender`)
        seconds: float,
    ) -> dict[int, Exception]:
        outgoing, text = OutgoingMessages(self._group), _encode(message)
        for position, rank in enumerate(self.ranks, 1):
            if rank in steps:
                outgoing.post(rank, position, MessageHeader(steps[rank], message.kind), text)
        # Uninterrupted: a rank that has not made the step yet reads it later.
        is_done(self._finish_in_thread(outgoing), seconds)
        return {}

    def _copy(self, batch: OutgoingBatch) -> Tensor | None:
        """The bytes of a batch in memory that is used again once gloo has sent it; None if it has no tensors."""
        if not batch.size:
            return None
        buffer = self._arena.take(batch.size)
        try:
            batch.write(buffer)
            return torch.from_numpy(bytes_of(buffer)[: batch.size])
        finally:
            # The buffer lives as long as the tensor over it.
            buffer.release()

    def _finish_in_thread(self, outgoing: OutgoingMessages) -> Future[None]:
        """Have a thread wait until messages are sent."""
        # A thread that waits for a late rank, perhaps for ever, is left behind.
        future = self._thread.submit(outgoing.wait, waits=False)
        self._posted = outgoing, future
        return future


class OutgoingMessages:
    """Messages that gloo is sending. `post` all of them, then have a `DaemonThread` `wait` for them.

    Args:
        group: the backend of the group.

    Attributes:
        waiting_for: the rank whose messages `wait` is waiting for.
        errors: by rank, why its messages could not be sent.
        sent_bytes: bytes of batches that are sent.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.waiting_for: int | None = None
        self.errors: dict[int, Exception] = {}
        self.sent_bytes = 0
        self._posted: deque[tuple[int, list[Any], list[Tensor]]] = deque()

    def post(
        self, rank: int, position: int, header: MessageHeader, text: bytes, payload: Tensor | None = None
    ) -> None:
        """Begin to send a rank, at this position in the group, a text, or a batch with its schema as the text.

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
            works = [self._group.send([message], position, _TAG) for message in messages]
            self._posted.append((rank, works, messages))
        except Exception as error:  # noqa: BLE001 (the other receivers get theirs)
            self.errors[rank] = error

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
    """Receives from the source, the first rank of a gloo group: a `Receiver`.

    Args:
        group: the backend of the group.
        thread: waits for messages.
        arena: memory for batches that is used again.
        passes_on: whether other ranks of this node get their batches from this rank.
    """

    name: Final = "gloo"

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


def _encode(message: Text) -> bytes:
    return message.text.encode(errors="replace")
