"""From the source to a rank of its node: a board in shared memory for messages, parcels for tensors.

A `SharedMemorySender` is the source's end, a `SharedMemoryReceiver` the receiver's. What always holds:

1. A parcel's memory is one receiver's alone, or shared by several of which whoever writes gets pages of its own, from
   the message that refers to it until nothing there refers to it any more: the kernel holds a lease as long. A batch
   is its receiver's own. What a receiver is done with and did not open, as it could not, is used again too.
2. The descriptor of memory that a receiver does not know is on the line before the message that refers to it. What a
   source gave is there for its receivers though the source has ended.
3. Memory that a message refers to holds the batch, or the message says that it is on its way and another one follows:
   that it is there, or why it will not be, or what there is in its place.
4. A source is at most `_ROUNDS` rounds ahead of a receiver, and `limit` bytes, or one batch where that is larger. What
   it fails with has a place even so. Memory for one batch more is set aside where a receiver was told of it early.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish._native import BufferLease
from tundish.errors import SegmentGoneError, StorageError, TimedOutError
from tundish.scatter.inherited import MOST_KNOWN, Inherited
from tundish.scatter.outgoing_batch import OutgoingBatch
from tundish.scatter.received_batch import ReceivedBatch, bytes_of
from tundish.scatter.transport.message_header import (
    BATCH,
    FAILED,
    FILLED,
    FILLING,
    FRESH,
    HEAD_BYTES,
    LOST,
    NOWHERE,
    SAID,
    SHARED,
    Head,
    Known,
    Reference,
    Told,
)
from tundish.tree import Schema

if TYPE_CHECKING:
    from tundish._native import ArenaStats

__all__ = ["MOST_HELD", "HungUpError", "SharedMemoryReceiver", "SharedMemorySender", "own_pages"]

# Batches in memory that is used again, which take a descriptor each. Whoever keeps more of them has the others in
# ordinary memory.
MOST_HELD: Final = 128

# Rounds that a source may be ahead, of a message or two, and messages more for what it fails with.
_ROUNDS = 4
_SPARE = 2
_SLOTS = 2 * _ROUNDS + 1 + _SPARE
# So many batches in a row with the same form make it likely that the next one has it too.
_HABIT = 2
# Room for a message; what is longer goes into the parcel.
_MESSAGE_BYTES = 32 * 1024
# A receiver with a processor to itself spends awake what waits are over sooner: to be woken takes it a tenth of what a
# small batch takes in all.
_AWAKE_SECONDS = 0.0005
_DESCRIPTOR = struct.calcsize("i")
# What is said with a descriptor: the identity of its memory, and whether others get the same.
_MARK = struct.Struct("<Q?")
# What wants to wait gives this the wait itself, which takes seconds and says whether it came to its end.
Waiter = Callable[[Callable[[float], bool]], None]


class HungUpError(Exception):
    """The other end of a line is closed."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Announcement(NamedTuple):
    """A batch that its receiver was told of before it is written.

    Attributes:
        shipment: to be written to.
        schema: that was told.
    """

    shipment: BufferLease
    schema: Schema


def _have_one_form(one: Schema, other: Schema) -> bool:
    """Whether the tensors of two batches lie in memory alike, and go to the same places."""
    return one.layout is other.layout and one.structure is other.structure


class SharedMemorySender:
    """The source's end of the way to `rank`.

    `limit`: bytes that may be on their way, and that are kept for the next batches.
    """

    def __init__(self, rank: int, line: socket.socket, limit: int) -> None:
        self.rank = rank
        self.arena = _native.SegmentArena(limit)
        self._line = line
        self._limit = limit
        self._board = _native.TaskQueue(_SLOTS, _MESSAGE_BYTES)
        self._told = Told()
        # What the receiver has not looked at yet, by ticket: its bytes, and in what they are.
        self._ahead: dict[int, tuple[int, BufferLease | None]] = {}
        self._finished: list[list[tuple[int, int, Any]]] = []
        # Segments whose descriptors it was sent.
        self._known: dict[bytes, None] = {}
        # Of the last batch that was announced, and how many before it had the same form.
        self._last: Schema | None = None
        self._alike = 0

    def introduce(self) -> None:
        """Send the receiver the board, over the line."""
        socket.send_fds(self._line, [_MARK.pack(0, False)], [self._board.fd])

    def give(self, number: int, departure: OutgoingBatch, wait: Waiter) -> int:
        """Send a batch; the bytes that were copied."""
        try:
            head, said = self._head(number, departure.schema, departure.size, wait)
            if departure.size == 0:
                self._put(head.pack() + said, 0, None)
            else:
                self._make_room(departure.size, wait)
                self._send(head, said, departure.size, departure.write)
        except BaseException:
            self._told.forget()
            raise
        self._last = None
        return departure.size

    def announce(self, number: int, departure: OutgoingBatch, wait: Waiter) -> Announcement:
        """Send the head of a batch that `fill` is to follow: the receiver gets ready meanwhile."""
        schema, last = departure.schema, self._last
        try:
            head, said = self._head(number, schema, departure.size, wait)
            self._make_room(departure.size, wait)
            announcement = self._announce(head, said, schema)
        except BaseException:
            self._told.forget()
            raise
        is_alike = last is not None and _have_one_form(schema, last)
        self._last, self._alike = schema, self._alike + 1 if is_alike else 0
        return announcement

    def foretell(self, number: int, most: int = sys.maxsize) -> Announcement | None:
        """Announce a batch that nobody has looked at yet, as one of the form that the last ones had.

        None where they had several, or more than `most` bytes, or the receiver has other messages to look at than that
        its last batch is there. `fill` is to follow where it `fits` the batch, else whatever the batch wants: then the
        announcement means nothing.
        """
        schema = self._last
        if schema is None or self._alike < _HABIT or schema.layout.total > most:
            return None
        if self._ahead:
            self._collect()
        again = None if self._ahead else self._told.again(schema)
        if again is None:
            return None
        return self._announce(Head(number, BATCH, *again, size=schema.layout.total), b"", schema)

    def fits(self, announcement: Announcement, departure: OutgoingBatch) -> bool:
        """Whether `fill` can send a batch as what was announced."""
        return (
            _have_one_form(announcement.schema, departure.schema)
            and HEAD_BYTES + len(departure.schema.values) <= self._board.capacity
        )

    def fill(self, number: int, departure: OutgoingBatch, announcement: Announcement) -> int:
        """Write what was announced and say so; the bytes that were copied."""
        departure.write(announcement.shipment.buffer)
        head, said, schema = Head(number, FILLED), b"", departure.schema
        try:
            if schema is not announcement.schema:
                flags, place, said = self._told.tell(schema)
                head = head._replace(flags=flags, place=place, said=len(said))
                self._last = schema
            if self._board.put(0, head.pack() + said) is None:
                raise RuntimeError("a board has no room where fewer messages than it holds are on it")
        except BaseException:
            self._told.forget()
            raise
        # Now that the receiver has its batch rather than before the next one goes.
        self._collect()
        return departure.size

    def load(self, departure: OutgoingBatch) -> BufferLease:
        """Write a batch that this lane and others share."""
        parcel = self.arena.take(departure.size)
        departure.write(parcel)
        return BufferLease(parcel)

    def share(
        self, number: int, schema: Schema, size: int, shipment: BufferLease | None, wait: Waiter
    ) -> None:
        """Send a batch whose tensors, `size` bytes, are in memory that others get too, if there are any."""
        try:
            head, said = self._head(number, schema, size, wait)
            self._make_room(size, wait)
            if shipment is not None:
                head = head._replace(flags=head.flags | SHARED, reference=shipment.reference)
                head = self._announced(head, shipment.buffer)
            self._put(head.pack() + said, size, shipment)
        except BaseException:
            self._told.forget()
            raise
        self._last = None

    def say(self, number: int, kind: int, text: str, wait: Waiter) -> None:
        """Send a message without a batch; `text` is cut to the room for it."""
        room = self._board.capacity - HEAD_BYTES
        said = text.encode(errors="replace")[:room].decode(errors="ignore").encode()
        self._make_room(0, wait, _ROUNDS + _SPARE if kind in (FAILED, LOST) else _ROUNDS)
        self._put(Head(number, kind, said=len(said)).pack() + said, 0, None)

    def stats(self) -> ArenaStats:
        return self.arena.stats()

    def close(self) -> None:
        """Let go of line and memory; what the receiver has not taken yet is there for it all the same."""
        for _, shipment in self._ahead.values():
            if shipment is not None:
                shipment.buffer.release()
        self._line.close()

    def _head(self, number: int, schema: Schema, size: int, wait: Waiter) -> tuple[Head, bytes]:
        """The head of a batch and what is said with it; what is too long for that is sent before."""
        flags, place, said = self._told.tell(schema)
        head = Head(number, BATCH, flags, place, len(said), size)
        self._make_room(0, wait)
        if HEAD_BYTES + len(said) <= self._board.capacity:
            return head, said
        length = len(said)

        def write(parcel: _native.SendBuffer) -> None:
            memoryview(parcel)[:] = said

        self._send(Head(number, SAID, size=length), b"", length, write)
        self._make_room(0, wait)
        return head, b""

    def _announce(self, head: Head, said: bytes, schema: Schema) -> Announcement:
        parcel = self.arena.take(head.size)
        try:
            shipment = BufferLease(parcel)
            head = head._replace(flags=head.flags | FILLING, reference=shipment.reference)
            self._put(self._announced(head, parcel).pack() + said, head.size, shipment)
        except BaseException:
            parcel.revoke()
            raise
        return Announcement(shipment, schema)

    def _send(self, head: Head, said: bytes, size: int, write: Callable[[_native.SendBuffer], None]) -> None:
        """Send what `write` puts into a parcel that the receiver alone has."""
        parcel = self.arena.take(size)
        try:
            write(parcel)
            shipment = BufferLease(parcel)
            head = self._announced(head._replace(reference=shipment.reference), parcel)
            self._put(head.pack() + said, size, shipment)
        except BaseException:
            parcel.revoke()
            raise

    def _put(self, message: bytes, size: int, shipment: BufferLease | None) -> None:
        ticket = self._board.put(0, message)
        if ticket is None:
            raise RuntimeError("a board has no room where fewer messages than it holds are on it")
        self._ahead[ticket] = size, shipment

    def _make_room(self, size: int, wait: Waiter, messages: int = _ROUNDS) -> None:
        ahead = self._ahead
        self._collect()
        while len(ahead) >= messages or (
            size and ahead and sum(one for one, _ in ahead.values()) + size > self._limit
        ):
            wait(lambda seconds: self._board.wait(seconds, True))
            self._collect()

    def _collect(self) -> None:
        # What the board has given is not lost where Ctrl-C comes between any two of these.
        self._finished.extend(itertools.starmap(self._board.collect, ((),)))
        while self._finished:
            for ticket, _, _ in self._finished[-1]:
                self._ahead.pop(ticket, None)
            self._finished.pop()

    def _announced(self, head: Head, parcel: _native.SendBuffer) -> Head:
        """The head of a message with memory whose descriptor, where the receiver does not have it, is on the line."""
        mark = _MARK.pack(head.reference[2], bool(head.flags & SHARED))
        if mark in self._known:
            return head
        if len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        try:
            socket.send_fds(self._line, [mark], [parcel.descriptor])
        except ConnectionError as error:
            raise HungUpError(self.rank) from error
        self._known[mark] = None
        return head._replace(flags=head.flags | FRESH)


class SharedMemoryReceiver:
    """A receiver's end of the way from its source, the process `source`; takes over `line`.

    `awake`: whether a processor may be kept busy for short waits.
    """

    def __init__(self, line: socket.socket, source: int, *, awake: bool) -> None:
        self._line = line
        self._source = source
        self._known = Known()
        self._parcels = _native.BufferReceiver()
        # Of memory that others have too.
        self._shared = Inherited()
        # What was heard on the line and not yet seen to: identities, whether others have it too, and descriptors.
        self._heard: list[tuple[int, bool, int]] = []
        self._hear()
        if not self._heard:
            # What is on the line comes without the descriptor where there is no room for that.
            self._need_room(1)
        [(_, _, descriptor)] = self._heard
        self._heard.clear()
        try:
            self._board = _native.TaskQueue.open(descriptor, _AWAKE_SECONDS if awake else None)
        finally:
            os.close(descriptor)
        # What was taken off the board and is looked at, whether the board was told that it has been, and what was found
        # in it: Ctrl-C may come between any two steps, and what it interrupts is looked at once more.
        self._taken: list[Any] = []
        self._over: list[None] = []
        self._read: tuple[Head, ReceivedBatch | str] | None = None
        self._said: bytes | None = None

    def wait(self, seconds: float) -> bool:
        """Whether a message is there within so many seconds."""
        if self._over:
            self._taken.clear()
            self._over.clear()
        if not self._taken:
            with contextlib.suppress(TimedOutError):
                self._taken.extend(map(self._board.take, (0,), (seconds,)))
        return bool(self._taken)

    def read(self) -> tuple[Head, ReceivedBatch | str] | None:
        """The message that is there, with its batch or its text, until it is `done` with.

        None where another one belongs to it, or follows it. Where that fails it is gone, unless it was interrupted.
        """
        if self._read is None:
            ticket, _, message = self._taken[0]
            try:
                self._read = self._look_at(Head.unpack(message), message[HEAD_BYTES:])
            except Exception:
                self._finish(ticket)
                raise
            if self._read is None:
                self._finish(ticket)
        return self._read

    def done(self) -> None:
        """Be done with the message that was read: the next one is the one after it. Once more, it is nothing."""
        # Interrupted in between, it is looked at once more, with what was said before it.
        self._read = None
        if not self._over:
            self._finish(self._taken[0][0])
        self._said = None

    def _look_at(self, head: Head, said: bytes) -> tuple[Head, ReceivedBatch | str] | None:
        if head.kind == SAID:
            # Where it cannot be opened, what it belongs to is not to take an earlier one for it.
            self._said = None
            with contextlib.suppress(SegmentGoneError):
                self._said = self._open(head).tobytes()
            return None
        is_elsewhere = len(said) < head.said
        missing = is_elsewhere and self._said is None
        if missing and not head.tells:
            raise LookupError("what was said in this round did not come")
        if is_elsewhere and self._said is not None:
            said = self._said
        schema: Schema | Exception | None = None
        if head.tells:
            # First: later messages may refer to it, whatever becomes of the memory; and to that likewise.
            try:
                schema = self._known.miss(head) if missing else self._known.hear(head, said)
            except Exception as error:  # noqa: BLE001 (raised below)
                schema = error
        try:
            memory = None if head.reference == NOWHERE else self._open(head)
        except SegmentGoneError:
            # Nor is it reached by a process that has no descriptor or no addresses left for it.
            inherited = self._shared.get(head.reference[2])
            self._need_room(head.reference[4] if inherited is None else os.fstat(inherited).st_size)
            # The source was interrupted right after this message and took it back; it says so in another one.
            return None
        if isinstance(schema, Exception):
            raise schema
        if schema is None:
            return head, said.decode(errors="replace")
        if memory is None or head.flags & SHARED or self._parcels.views <= MOST_HELD:
            return head, ReceivedBatch(schema, memory)
        if head.flags & FILLING:
            return head, ReceivedBatch(schema, memory, is_lent=True)
        return head, ReceivedBatch(schema, memory.copy())

    def _finish(self, ticket: int) -> None:
        # In one step for Ctrl-C.
        self._over.extend(itertools.starmap(self._board.finish, ((ticket, 0, b""),)))

    def close(self) -> None:
        self._line.close()
        self._shared.close()
        while self._heard:
            os.close(self._heard.pop()[2])

    def _open(self, head: Head) -> NDArray[np.uint8]:
        if head.flags & FRESH:
            self._hear()
        # Also of messages that are yet to come: where one fails, the others are seen to with the next message.
        while self._heard:
            identity, is_shared, descriptor = self._heard.pop(0)
            if is_shared:
                self._shared.keep(identity, descriptor)
            else:
                self._parcels.adopt(descriptor, self._source)
        if head.flags & SHARED:
            return own_pages(head.reference, self._shared.get(head.reference[2]))
        return bytes_of(self._parcels.open(head.reference))

    def _need_room(self, size: int) -> None:
        """Raise `StorageError` where this process can open no more, or not map so many bytes."""
        try:
            os.close(os.dup(self._line.fileno()))
            mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ).close()
        except OSError as error:
            raise StorageError(
                error.errno,
                f"shared memory cannot be opened: {error.strerror}; look at the limits of this process (`ulimit -a`)",
            ) from None

    def _hear(self) -> None:
        """Take the descriptors that are on the line by now off it, each with what was said of it."""
        room, flags = socket.CMSG_SPACE(_DESCRIPTOR), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        with contextlib.suppress(BlockingIOError):
            while (heard := self._line.recvmsg(_MARK.size, room, flags))[0]:
                identity, is_shared = _MARK.unpack(heard[0])
                for _, _, content in heard[1]:
                    self._heard += [
                        (identity, is_shared, descriptor) for descriptor in array.array("i", content)
                    ]


def own_pages(reference: Reference, inherited: int | None = None) -> NDArray[np.uint8]:
    """Memory that others have too, of which this process gets pages of its own where it writes.

    `inherited`: a descriptor of it.
    """
    process, descriptor, identity, generation, _ = reference
    segment = _native.SharedSegment.attach((process, descriptor, identity, generation), inherited)
    return bytes_of(segment.private())
