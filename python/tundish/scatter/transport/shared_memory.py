"""Batches between ranks of one node: a queue of messages and buffers of tensors, both in shared memory.

The sender writes a batch once, and the receiver's tensors lie in the same memory. Behind the tensors lies the schema.

Invariants:
- A buffer belongs to one receiver, which leases it as long as any of its tensors lives; the kernel holds the lease. A
  buffer that several receivers read is `SHARED`: each copies the batch before it is done with the message.
- The descriptor of memory that is new to a receiver is on the socket before the message that refers to it. So a batch
  can be received though its source has ended.
- A sender is at most `_MAX_MESSAGES` messages and `limit` bytes ahead of its receiver. Errors have room even then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish._native import SentBuffer
from tundish.errors import StorageError, TimedOutError
from tundish.scatter.batch_bytes import IncomingBatch, OutgoingBatch, bytes_of, decode_schema
from tundish.scatter.transport.message import (
    GONE,
    HEADER_BYTES,
    MAX_LEASES,
    NEW_MEMORY,
    SHARED,
    ChannelBrokenError,
    Content,
    IncomingMessage,
    MessageHeader,
    MessageKind,
    Text,
    Wait,
    Waiter,
)

if TYPE_CHECKING:
    from tundish._native import ArenaStats

# How many segments a sender remembers whose descriptors it has sent.
_MAX_KNOWN_SEGMENTS = 128
# Messages that a sender may be ahead, and how many more may carry errors.
_MAX_MESSAGES = 4
_ERROR_MESSAGES = 2
# Size of a message with a text; a longer text is cut.
_MESSAGE_BYTES = 32 * 1024
# Goes along with a descriptor, because a stream carries none without a byte.
_MARK = b"d"


class NodeSender:
    """Sends to the ranks of this node that get their batches from this one: the `Sender` of shared memory."""

    name: Final = "shared memory"

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._channels: dict[int, SharedMemorySender] = {}

    @property
    def ranks(self) -> Sequence[int]:
        return tuple(self._channels)

    def add(self, channel: SharedMemorySender) -> None:
        """Send to one more rank. Closes the channel in the end."""
        self._channels[channel.rank] = channel

    def send(self, step: int, contents: Mapping[int, Content], waiting: set[int], wait: Wait) -> None:
        readers = Counter(id(contents[rank]) for rank in self._channels)
        leases: dict[int, SentBuffer] = {}
        for rank, channel in self._channels.items():
            content, wait_for_rank = contents[rank], _waiter(wait, rank)
            if isinstance(content, Text):
                channel.send_text(step, content.kind, content.text, wait_for_rank)
            else:
                is_shared = readers[id(content)] > 1
                lease = leases.get(id(content))
                if lease is None:
                    lease = channel.write(content, wait_for_rank)
                    self.sent_bytes += content.size
                if is_shared:
                    leases[id(content)] = lease
                schema_bytes = len(content.encoded_schema)
                channel.send(step, content.size, schema_bytes, lease, wait_for_rank, is_shared=is_shared)
            waiting.discard(rank)

    def finish(self, wait: Wait) -> None:
        """Do nothing: a message is there once it is sent."""

    def tell(
        self,
        steps: Mapping[int, int],
        message: Text,
        wait: Wait,
        seconds: float,  # noqa: ARG002 (as each `Sender`)
    ) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for rank, step in steps.items():
            try:
                self._channels[rank].send_text(step, message.kind, message.text, _waiter(wait, rank))
            except Exception as error:  # noqa: BLE001 (the caller says so)
                errors[rank] = error
        return errors

    def pass_on(self, message: IncomingMessage, wait: Wait) -> None:
        """Send all of them a message that came from another node."""
        header, lease = message.header, None if message.buffer is None else SentBuffer(message.buffer)
        for rank, channel in self._channels.items():
            wait_for_rank = _waiter(wait, rank)
            if lease is None:
                channel.send_text(header.step, header.kind, str(message.content), wait_for_rank)
            else:
                channel.send(
                    header.step, header.size, header.text_bytes, lease, wait_for_rank, is_shared=True
                )

    def memory(self) -> Counter[str]:
        """Bytes of the shared memory for all of them, as `ArenaStats` names them."""
        total: Counter[str] = Counter()
        for channel in self._channels.values():
            total.update(cast(Mapping[str, int], channel.stats()))
        return total

    def close(self) -> None:
        """Close the channels. The receivers can still read the messages that were sent."""
        for channel in self._channels.values():
            channel.close()
        self._channels = {}


class SharedMemorySender:
    """Sends to one receiver of this node.

    Args:
        rank: the receiver's global rank.
        connection: a unix socket to the receiver, which takes descriptors. The sender closes it.
        limit: bytes that may be on their way, and bytes that are kept for the next batches.
    """

    def __init__(self, rank: int, connection: socket.socket, limit: int) -> None:
        self.rank = rank
        self._connection = connection
        self._limit = limit
        self._arena = _native.SegmentArena(limit)
        self._queue = _native.TaskQueue(_MAX_MESSAGES + _ERROR_MESSAGES, _MESSAGE_BYTES)
        # Messages that the receiver has not read, by ticket: bytes of the batch, and its memory.
        self._unread: dict[int, tuple[int, SentBuffer | None]] = {}
        # Identities of segments, oldest first.
        self._known_segments: dict[int, None] = {}

    def send_queue(self) -> None:
        """Send the receiver the descriptor of the queue."""
        socket.send_fds(self._connection, [_MARK], [self._queue.fd])

    def write(self, batch: OutgoingBatch, wait: Waiter) -> SentBuffer:
        """Write a batch into shared memory, once the receiver has room for it."""
        self._wait_for_room(wait, size=batch.size)
        schema = batch.encoded_schema
        buffer = self._arena.take(batch.size + len(schema))
        try:
            batch.write(buffer)
            memoryview(buffer)[batch.size :] = schema
            return SentBuffer(buffer)
        except BaseException:
            buffer.revoke()
            raise

    def send(
        self, step: int, size: int, schema_bytes: int, lease: SentBuffer, wait: Waiter, *, is_shared: bool
    ) -> None:
        """Send a batch that lies in shared memory: `size` bytes of tensors, then the schema.

        Raises `ChannelBrokenError` where the receiver has closed its socket.
        """
        self._wait_for_room(wait, size=size)
        header = MessageHeader(
            step, MessageKind.BATCH, SHARED * is_shared, schema_bytes, size, lease.reference
        )
        identity = lease.reference[2]
        if identity not in self._known_segments:
            if len(self._known_segments) >= _MAX_KNOWN_SEGMENTS:
                del self._known_segments[next(iter(self._known_segments))]
            try:
                socket.send_fds(self._connection, [_MARK], [lease.buffer.descriptor])
            except ConnectionError as error:
                raise ChannelBrokenError(self.rank, GONE) from error
            self._known_segments[identity] = None
            header = header._replace(flags=header.flags | NEW_MEMORY)
        self._put(header.pack(), size, lease)

    def send_text(self, step: int, kind: MessageKind, text: str, wait: Waiter) -> None:
        """Send a message without a batch; `text` is cut to the room for it."""
        room = self._queue.capacity - HEADER_BYTES
        encoded = text.encode(errors="replace")[:room].decode(errors="ignore").encode()
        is_error = kind in (MessageKind.FAILED, MessageKind.CLOSED)
        self._wait_for_room(wait, messages=_MAX_MESSAGES + _ERROR_MESSAGES * is_error)
        self._put(MessageHeader(step, kind, text_bytes=len(encoded)).pack() + encoded, 0, None)

    def stats(self) -> ArenaStats:
        """Bytes of the shared memory for this receiver."""
        return self._arena.stats()

    def close(self) -> None:
        """Close the socket. The receiver can still read the messages that were sent."""
        for _, lease in self._unread.values():
            if lease is not None:
                lease.buffer.release()
        self._connection.close()

    def _put(self, message: bytes, size: int, lease: SentBuffer | None) -> None:
        ticket = self._queue.put(0, message)
        if ticket is None:
            raise RuntimeError("the message queue is full though fewer messages are unread than it holds")
        self._unread[ticket] = size, lease

    def _wait_for_room(self, wait: Waiter, *, size: int = 0, messages: int = _MAX_MESSAGES) -> None:
        self._drop_read_messages()
        unread = self._unread
        while len(unread) >= messages or (
            size and unread and sum(one for one, _ in unread.values()) + size > self._limit
        ):
            wait(lambda seconds: self._queue.wait(seconds, True))
            self._drop_read_messages()

    def _drop_read_messages(self) -> None:
        for ticket, _, _ in self._queue.collect():
            self._unread.pop(ticket, None)


class SharedMemoryReceiver:
    """Receives from one sender of this node: a `Receiver`.

    Args:
        connection: a unix socket to the sender. The receiver closes it.
        sender_process: the sender's process id.
    """

    name: Final = "shared memory"
    _queue: _native.TaskQueue

    def __init__(self, connection: socket.socket, sender_process: int) -> None:
        self._connection = connection
        self._sender_process = sender_process
        self._memory = _native.BufferReceiver()
        self._message: Any = None

    def receive_queue(self) -> None:
        """Receive the queue. Call it once, after the sender's `send_queue`.

        Raises `StorageError` where this process can open no more files.
        """
        descriptor = self._receive_descriptor()
        try:
            self._queue = _native.TaskQueue.open(descriptor)
        finally:
            os.close(descriptor)

    def wait(self, seconds: float) -> bool:
        """Whether a message came within so many seconds."""
        if self._message is None:
            with contextlib.suppress(TimedOutError):
                self._message = self._queue.take(0, seconds)
        return self._message is not None

    def read(self) -> IncomingMessage:
        """The message that `wait` found. A message that cannot be read is gone.

        Raises:
            StorageError: this process can open no more files.
            SegmentGoneError: the memory of the batch cannot be reached.
        """
        if self._message is None:
            raise RuntimeError("read() was called before wait() found a message")
        (ticket, _, message), self._message = self._message, None
        try:
            header, text = MessageHeader.unpack(message), message[HEADER_BYTES:]
            if header.kind != MessageKind.BATCH:
                return IncomingMessage(header, text.decode(errors="replace"))
            return IncomingMessage(header, self._batch(header))
        finally:
            self._queue.finish(ticket, 0, b"")

    def close(self) -> None:
        """Close the socket. Batches stay."""
        self._connection.close()

    def _batch(self, header: MessageHeader) -> IncomingBatch:
        if header.flags & NEW_MEMORY:
            self._memory.adopt(self._receive_descriptor(), self._sender_process)
        memory: NDArray[np.uint8] = bytes_of(self._memory.open(header.memory))
        schema = decode_schema(memory[header.size : header.size + header.text_bytes])
        if not header.size:
            return IncomingBatch(schema, None)
        tensors = memory[: header.size]
        if header.flags & SHARED or self._memory.views > MAX_LEASES:
            tensors = tensors.copy()
        return IncomingBatch(schema, tensors)

    def _receive_descriptor(self) -> int:
        """The next descriptor on the socket, which was sent before the message that needs it."""
        _, descriptors, flags, _ = socket.recv_fds(self._connection, len(_MARK), 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            why = os.strerror(errno.EMFILE) if flags & socket.MSG_CTRUNC else "the sender has closed it"
            raise StorageError(
                errno.EMFILE, f"shared memory cannot be opened: {why}; look at `ulimit -n` of this process"
            )
        return descriptors[0]


def _waiter(wait: Wait, rank: int) -> Waiter:
    return lambda is_ready: wait(is_ready, rank)
