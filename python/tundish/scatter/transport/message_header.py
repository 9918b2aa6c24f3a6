"""The fixed-size header of every message from a source to a receiver.

The text after a header is a schema, an error or a control message. Every header has the number of its step: a receiver
that left a step early skips the messages of that step.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

__all__ = [
    "DEVICE",
    "HEADER_BYTES",
    "NEW_MEMORY",
    "NO_MEMORY",
    "SHARED",
    "MemoryReference",
    "MessageHeader",
    "MessageKind",
]


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
