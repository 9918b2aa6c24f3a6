"""What a source tells a receiver in a round, in bytes.

Owns the form of a message's head and the tables of schemas that both ends keep. What always holds:

1. A round's number is in every message of it, so that a receiver who left a round in the middle is in step again with
   its next call.
2. A structure and a layout that a receiver knows are told as a number. Both ends hold on to the same `_KNOWN` ones:
   the source says which place of the receiver's table a new one takes.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, NoReturn

from tundish.errors import NotPicklableError
from tundish.tree import Schema

__all__ = [
    "BATCH",
    "DIRECT",
    "FAILED",
    "FILLED",
    "FILLING",
    "FRESH",
    "HEAD_BYTES",
    "JOINED",
    "JOINING",
    "LOST",
    "NOTE",
    "NOTHING",
    "SAID",
    "SHARED",
    "Head",
    "Known",
    "Reference",
    "Told",
]

# A batch; none for this rank; the source failed in this round; a rank is lost, in this round and all later ones; what
# the next message says, where that is too long for it; a text in place of the batches of a round; that the batch of
# this round, which was said to be on its way, is there; where that was said before the batch was looked at, with what
# is then known of its schema.
BATCH: Final = 1
NOTHING: Final = 2
FAILED: Final = 3
LOST: Final = 4
SAID: Final = 5
NOTE: Final = 6
FILLED: Final = 7

# How the schema is told: whole, with its values or, where these are the last ones of their place too, not at all.
_WHOLE: Final = 1
_VALUES: Final = 2
_SAME: Final = 3
_PICKLED: Final = 4
# The descriptor of the memory is on the line.
FRESH: Final = 8
# Others have the same memory: who writes gets pages of its own.
SHARED: Final = 16
# Tensors come from device to device, and all receivers on other nodes take part in that.
DIRECT: Final = 32
# The bytes are still being written: what the receiver has to do beforehand it can do meanwhile.
FILLING: Final = 64
# The receiver has room for as many bytes behind the next head, until another batch comes.
JOINING: Final = 128
# The bytes are behind this head.
JOINED: Final = 256
# Schemas that a receiver keeps.
_KNOWN = 64
_HEAD = struct.Struct("<QBHHIQiQQQQ")
HEAD_BYTES: Final = _HEAD.size

# Process, descriptor, identity, generation, bytes: as compiled.
Reference = tuple[int, int, int, int, int]
NOWHERE: Final[Reference] = (0, 0, 0, 0, 0)


class Head(NamedTuple):
    """The head of a message.

    Attributes:
        number: of the round.
        kind: `BATCH`, …
        flags: how the schema is told, and whether the memory is new to the receiver.
        place: which place of the receiver's table it has.
        said: bytes of what is said: of the schema, or of an error.
        size: bytes of the tensors.
        reference: to the memory in which they lie.
    """

    number: int
    kind: int
    flags: int = 0
    place: int = 0
    said: int = 0
    size: int = 0
    reference: Reference = NOWHERE

    @property
    def tells(self) -> int:
        """How a schema is told with it; 0 where none is."""
        return self.flags & (FRESH - 1)

    def pack(self) -> bytes:
        process, descriptor, identity, generation, room = self.reference
        return _HEAD.pack(
            self.number,
            self.kind,
            self.flags,
            self.place,
            self.said,
            self.size,
            descriptor,
            process,
            identity,
            generation,
            room,
        )

    @classmethod
    def unpack(cls, message: bytes | bytearray) -> Head:
        number, kind, flags, place, said, size, descriptor, process, identity, generation, room = (
            _HEAD.unpack_from(message)
        )
        return cls(number, kind, flags, place, said, size, (process, descriptor, identity, generation, room))


class Told:
    """What a source has told one receiver of schemas."""

    def __init__(self) -> None:
        # By structure and layout, which are held on to, so that no other has their identity.
        self._places: dict[tuple[int, int], int] = {}
        self._table: list[Schema | None] = [None] * _KNOWN
        self._count = 0

    def tell(self, schema: Schema) -> tuple[int, int, bytes]:
        """Flags, place and what is to be said."""
        key = id(schema.structure), id(schema.layout)
        place = self._places.get(key)
        if place is None:
            place = self._count % _KNOWN
            self._count += 1
            before = self._table[place]
            if before is not None:
                del self._places[id(before.structure), id(before.layout)]
            self._places[key] = place
            self._table[place] = schema
            return _WHOLE, place, schema.encode()
        before = self._table[place]
        self._table[place] = schema
        if before is not None and before.values == schema.values and before.pickled == schema.pickled:
            return _SAME, place, b""
        return _VALUES | (_PICKLED if schema.pickled else 0), place, schema.values

    def again(self, schema: Schema) -> tuple[int, int] | None:
        """Flags and place, where `schema` is what was told last of its place; nothing has to be said then."""
        place = self._places.get((id(schema.structure), id(schema.layout)))
        return None if place is None or self._table[place] is not schema else (_SAME, place)

    def forget(self) -> None:
        """What was told last may not have come: everything is told anew."""
        self._places.clear()
        self._table = [None] * _KNOWN


class Known:
    """What a receiver knows of schemas."""

    def __init__(self) -> None:
        # Where one could not be read, why.
        self._table: list[Schema | NotPicklableError | None] = [None] * _KNOWN
        # Places of which what was said last did not come.
        self._missed: set[int] = set()

    def miss(self, head: Head) -> NoReturn:
        """What a message says of its schema could not be received: refuse it, and what refers to it."""
        self._missed.add(head.place)
        if head.tells == _WHOLE:
            self._table[head.place] = None
        raise LookupError(f"what was told of the schema under the number {head.place} did not come")

    def hear(self, head: Head, said: bytes | bytearray) -> Schema:
        """The schema that a message tells. Raises `NotPicklableError` where a type that it names is not found here."""
        flags = head.tells
        if flags == _WHOLE:
            try:
                schema = Schema.decode(said)
            except NotPicklableError as error:
                self._table[head.place] = error
                raise
        else:
            known = self._table[head.place]
            if isinstance(known, NotPicklableError):
                raise known
            if head.place in self._missed and (flags == _SAME or known is None):
                self.miss(head)
            if known is None:
                raise LookupError(f"no schema is known under the number {head.place}")
            if flags == _SAME:
                return known
            schema = Schema(known.structure, known.layout, bytes(said), bool(flags & _PICKLED))
        self._table[head.place] = schema
        self._missed.discard(head.place)
        return schema
