"""The messages between a source and its receivers, and what all transports of batches have in common.

A message is a header of a fixed size and a text: a schema, an error or a control message. Every header has the number
of its step: a receiver that left a step early skips the messages of that step.

`shared_memory` carries messages and batches between ranks of one node, `gloo` between nodes. `device` carries the
tensors alone, whose messages go over gloo.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from tundish import _native
from tundish.scatter.batch_bytes import IncomingBatch, OutgoingBatch

# Batches in memory that is used again. On a node each takes a descriptor. A receiver that keeps more gets copies.
MAX_LEASES: Final = 128

# Of a rank whose connection was closed, in messages.
GONE: Final = "was killed, has ended, or has left the scatter"

# Waits for an event. The argument is a function that waits for so many seconds, and returns whether the event came.
# Raises when the event cannot come any more.
Waiter = Callable[[Callable[[float], bool]], None]
# The same, for an event that comes from a rank; or from that which a function returns, once it is known.
Wait = Callable[[Callable[[float], bool], "int | Callable[[], int | None]"], None]


class MessageKind(IntEnum):
    """The kinds of messages."""

    BATCH = 1
    """A batch follows."""
    NOTHING = 2
    """This rank gets no batch in this step."""
    FAILED = 3
    """The source failed in this step; the text is its rank and the error."""
    CLOSED = 4
    """No step follows this one; the text is the rank that was lost and the reason."""
    CONTROL = 5
    """A text for all receivers in place of batches."""


# The memory is new to the receiver: its descriptor is on the socket.
NEW_MEMORY: Final = 1
# Other receivers read the same memory: the receiver copies the batch out of it.
SHARED: Final = 2
# The tensors travel from device to device.
DEVICE: Final = 4

_HEADER = struct.Struct("<QHHIQQiQQQ")
HEADER_BYTES: Final = _HEADER.size

# Process, descriptor in it, identity of the segment, generation, bytes: as the compiled module takes it.
MemoryReference = tuple[int, int, int, int, int]
NO_MEMORY: Final[MemoryReference] = (0, 0, 0, 0, 0)


class MessageHeader(NamedTuple):
    """The header of a message.

    Attributes:
        step: number of the step.
        kind: the kind of the message.
        flags: `NEW_MEMORY`, `SHARED` and `DEVICE`.
        text_bytes: bytes of the text that belongs to the message.
        size: bytes of the batch's tensors.
        memory: the shared memory with the tensors.
    """

    step: int
    kind: MessageKind
    flags: int = 0
    text_bytes: int = 0
    size: int = 0
    memory: MemoryReference = NO_MEMORY

    def pack(self) -> bytes:
        """The header in `HEADER_BYTES` bytes."""
        return _HEADER.pack(*self[:-1], *self.memory)

    @classmethod
    def unpack(cls, message: bytes | bytearray) -> MessageHeader:
        """The header at the beginning of `message`."""
        step, kind, flags, text_bytes, size, *memory = _HEADER.unpack_from(message)
        return cls(step, MessageKind(kind), flags, text_bytes, size, tuple(memory))


class Text(NamedTuple):
    """The content of a message without a batch."""

    kind: MessageKind
    text: str = ""


Content = OutgoingBatch | Text


class IncomingMessage(NamedTuple):
    """A message with its batch or its text.

    Attributes:
        header: the header.
        content: the batch, or the text of a message without one.
        buffer: the shared memory of the batch, if this rank passes it on to others.
    """

    header: MessageHeader
    content: IncomingBatch | str
    buffer: _native.SendBuffer | None = None


class Receiver(Protocol):
    """The end of a channel at which messages come, one after the other."""

    @property
    def name(self) -> str:
        """The transport, in counts."""

    def wait(self, seconds: float) -> bool:
        """Whether a message came within so many seconds, or an error that `read` raises."""

    def read(self) -> IncomingMessage:
        """The message that `wait` found. One that cannot be read is gone.

        Raises:
            OutOfMemoryError, StorageError: this process has no memory or no descriptor for it.
            RuntimeError: the sender is gone.
        """

    def close(self) -> None:
        """Take no more messages. Batches stay."""


class ChannelBrokenError(Exception):
    """Nothing can be sent to a rank any more. `how` follows the rank in messages."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(f"rank {rank} {how}")
        self.rank = rank
        self.how = how


class Sender(Protocol):
    """The end of all channels of one transport at which messages are sent.

    Attributes:
        sent_bytes: bytes of the batches that were sent.
    """

    sent_bytes: int

    @property
    def name(self) -> str:
        """The transport, in counts."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks on the other ends."""

    def send(self, step: int, contents: Mapping[int, Content], waiting: set[int], wait: Wait) -> None:
        """Begin to send each of the ranks its content of a step, and remove those from `waiting` that may have it.

        Raises `ChannelBrokenError`, the errors of `wait`, and those of writing a batch.
        """

    def finish(self, wait: Wait) -> None:
        """Wait until all that was begun is sent. Raises as `send`."""

    def tell(
        self, steps: Mapping[int, int], message: Text, wait: Wait, seconds: float
    ) -> dict[int, Exception]:
        """Tell some of the ranks of an error, each in its step, within `seconds`. Returns why others are not told."""
