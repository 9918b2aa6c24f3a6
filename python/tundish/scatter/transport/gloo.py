"""From the source to ranks of other nodes: messages of a gloo group that belongs to the scatter alone.

A `Courier` owns the thread that waits for them, which Ctrl-C does not reach. What always holds:

1. A round is, for each receiver, its head first, then the schema where that does not fit into it, then the tensors:
   those that are small together in one message, large ones from where they are and to where they stay, without a copy.
   All of it is made before the first of it is sent: a receiver never waits for what could not be made.
2. Where the batch before had small tensors only, the receiver has room for as many bytes behind the head, and a batch
   that fits into it comes in one message. A source that does not know what came last takes it that there is none.
3. All messages of a round are under way before one is waited for. What is sent is held until it was.
4. A caller whose wait is ended leaves it to the thread; what is sent next comes after what was sent before.
5. Large tensors are read while they are sent. Behind them comes a seal, from memory of this module: a source that
   leaves a round breaks it, before its caller can change them, with what it fails with. A receiver gets what was given
   or that.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import OutOfMemoryError, StorageError
from tundish.rawbytes import raw_bytes
from tundish.scatter.outgoing_batch import OutgoingBatch
from tundish.scatter.received_batch import ReceivedBatch, bytes_of
from tundish.scatter.transport.message_header import (
    BATCH,
    DIRECT,
    HEAD_BYTES,
    JOINED,
    JOINING,
    Head,
    Known,
    Told,
)
from tundish.scatter.transport.shared_memory import MOST_HELD
from tundish.tree import BufferLayout, Schema
from tundish.waiting import Moment, Thread

__all__ = ["Courier", "GlooReceiver", "GlooSender", "Job", "Sending"]

# A wait that gloo ends takes the connection along. So it never does: a caller has a patience of its own, and whoever
# comes late still finds what was sent.
_ENDLESS = timedelta(days=365)
# Room for the head and what is said with it; gloo takes hardly longer for it than for one byte.
_FIRST_BYTES = 4096
# Larger tensors are messages of their own.
_LARGE = 1 << 20
# As many bytes of small tensors come with the head. To copy more takes longer than another message.
_MOST_JOINED = 8 << 20
# Fewer are made of a batch while its bytes are on their way.
_MANY = 64
_TAG = 0
# Without memory, or without descriptors.
_NO_ROOM = (OutOfMemoryError, StorageError)

T = TypeVar("T")


class Piece(NamedTuple):
    """A message with tensors: those of these numbers, `start` to `stop` in the layout's buffer; or one large one."""

    start: int
    stop: int
    numbers: list[int]
    is_large: bool = False


class Job(Generic[T]):
    """Something that a courier does, once; `wait` for it, then take its `result`.

    Attributes:
        is_begun: whether a courier is known to have it.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self.is_begun = False
        self._work: Callable[[], T] | None = work
        self._over = Moment()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        work, self._work = self._work, None
        if work is None:
            # Whoever began it was interrupted, did not know that it had, and began it again.
            return
        try:
            self._result.append(work())
        except BaseException as error:  # noqa: BLE001 (raised where the result is taken)
            self._error = error
        finally:
            self._over.come()

    def wait(self, seconds: float) -> bool:
        """Whether it is over within so many seconds."""
        return self._over.wait(seconds)

    def result(self) -> T:
        """What came of it. Raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]


_Jobs = queue.SimpleQueue["Job[Any] | None"]


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        # Nobody keeps a batch alive by waiting for the next one.
        del job


class Courier:
    """A thread that does one job after the other. It ends with this object, or when it is closed."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self.close = weakref.finalize(self, self._jobs.put, None)
        self.close.atexit = False
        Thread(_serve, "tundish-scatter", (self._jobs,)).start()

    def do(self, work: Callable[[], T]) -> Job[T]:
        job = Job(work)
        self.begin(job)
        return job

    def begin(self, job: Job[Any]) -> None:
        self._jobs.put(job)
        job.is_begun = True


@lru_cache(256)
def _pieces(layout: BufferLayout) -> list[Piece]:
    """How the tensors of a layout are cut into messages, at both ends."""
    return list(_cut(layout))


def _cut(layout: BufferLayout) -> Iterator[Piece]:
    numbers: list[int] = []
    for number, (start, size) in enumerate(zip(layout.offsets, layout.sizes, strict=True)):
        if size >= _LARGE:
            if numbers:
                yield Piece(layout.offsets[numbers[0]], start, numbers)
                numbers = []
            yield Piece(start, start + size, [number], is_large=True)
        elif size:
            numbers.append(number)
    if numbers:
        yield Piece(layout.offsets[numbers[0]], layout.total, numbers)


def _is_sealed(layout: BufferLayout) -> bool:
    """Whether a seal comes behind the tensors of a layout, at both ends."""
    return any(piece.is_large for piece in _pieces(layout))


class GlooSender:
    """The source's end of the way to `rank`, which has `position` in `group`, as `GlooReceiver` has it."""

    def __init__(self, rank: int, group: Any, position: int, arena: _native.SegmentArena) -> None:
        self.rank = rank
        self._group = group
        self._position = position
        self._arena = arena
        self._told = Told()
        # Bytes for which the receiver has room behind the next head; and behind the head after the one that was made
        # last, once that is sent.
        self._behind = self._then_behind = 0
        # What comes behind the large tensors that were sent last.
        self._seal = bytearray(_FIRST_BYTES)

    def messages(
        self, number: int, content: OutgoingBatch | tuple[int, str], is_direct: bool = False
    ) -> list[torch.Tensor]:
        """What is to be sent of a batch, or of a kind and a text. Where it is not, `forget` has to be called.

        `is_direct`: whether tensors go from device to device, and here only what is said of them.
        """
        # None, as long as nobody knows whether these are sent.
        behind, self._behind = self._behind, 0
        self._then_behind = behind
        if isinstance(content, OutgoingBatch):
            flags, place, said = self._told.tell(content.schema)
            head = Head(number, BATCH, flags, place, len(said), content.size)
            self._then_behind = 0 if is_direct else _joining(content.schema.layout)
            if self._then_behind:
                head = head._replace(flags=head.flags | JOINING)
        else:
            said = content[1].encode(errors="replace")
            head = Head(number, content[0], said=len(said))
        if is_direct:
            head = head._replace(flags=head.flags | DIRECT)
        fits = HEAD_BYTES + len(said) <= _FIRST_BYTES
        if isinstance(content, OutgoingBatch) and fits and head.flags & JOINING and content.size <= behind:
            head = head._replace(flags=head.flags | JOINED)
            return [self._written(content, 0, content.size, content.numbers, head.pack() + said)]
        message = (head.pack() + (said if fits else b"")).ljust(_FIRST_BYTES, b"\0")
        messages = [torch.frombuffer(bytearray(message), dtype=torch.uint8)]
        if not fits:
            messages.append(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        if isinstance(content, OutgoingBatch) and not is_direct:
            messages.extend(self._tensor(content, piece) for piece in _pieces(content.schema.layout))
            if _is_sealed(content.schema.layout):
                self._seal = bytearray(_FIRST_BYTES)
                messages.append(torch.frombuffer(self._seal, dtype=torch.uint8))
        return messages

    def forget(self) -> None:
        """What was made last was not sent, or nobody knows."""
        self._behind = self._then_behind = 0
        self._told.forget()

    def break_seal(self, number: int, kind: int, text: str) -> None:
        """Large tensors that are still being sent may change from now on: whoever gets them is told this instead."""
        said, room = text.encode(errors="replace"), _FIRST_BYTES - 1 - HEAD_BYTES
        if len(said) > room:
            said = said[: room // 2] + said[-(room // 2) :]
        message = Head(number, kind, said=len(said)).pack() + said
        self._seal[1 : 1 + len(message)] = message
        # Last, as it may be sent just now.
        self._seal[0] = 1

    def post(self, messages: list[torch.Tensor], works: list[Any]) -> None:
        """Have them sent, in one step for Ctrl-C; each has to live until its work, which `works` gets, is over."""
        one_by_one = [[message] for message in messages]
        works.extend(
            map(self._group.send, one_by_one, itertools.repeat(self._position), itertools.repeat(_TAG))
        )
        self._behind = self._then_behind

    def _tensor(self, departure: OutgoingBatch, piece: Piece) -> torch.Tensor:
        """The bytes of a piece: large ones where they are, others written into warm memory one after the other."""
        tensor = departure.tensors[piece.numbers[0]]
        if piece.is_large and tensor.is_cpu and tensor.is_contiguous():
            return raw_bytes(tensor)
        return self._written(departure, piece.start, piece.stop, piece.numbers)

    def _written(
        self, departure: OutgoingBatch, start: int, stop: int, numbers: Sequence[int], head: bytes = b""
    ) -> torch.Tensor:
        """Bytes `start` to `stop` of the layout's buffer, with these tensors, in warm memory; behind a head or not."""
        lead = _FIRST_BYTES if head else 0
        parcel = self._arena.take(lead + stop - start)
        try:
            memoryview(parcel)[: len(head)] = head
            departure.write_some(parcel, numbers, start - lead)
            return torch.from_numpy(bytes_of(parcel)[: lead + stop - start])
        finally:
            # Used again when torch has let go of it.
            parcel.release()


class Sending:
    """Messages under way to receivers.

    Attributes:
        reached: the ranks whose messages somebody has waited for, or waits for.
    """

    def __init__(self) -> None:
        self.reached: list[int] = []
        self._posted: deque[tuple[int, list[Any], list[torch.Tensor]]] = deque()
        self._errors: dict[int, Exception] = {}
        self._finishing = threading.Lock()

    def post(self, lane: GlooSender, messages: list[torch.Tensor]) -> None:
        """Have a receiver's messages sent."""
        works: list[Any] = []
        # First, as Ctrl-C may come right behind: what is sent is held until it was.
        self._posted.append((lane.rank, works, messages))
        try:
            lane.post(messages, works)
        except Exception as error:  # noqa: BLE001 (the other receivers get theirs)
            lane.forget()
            self._errors[lane.rank] = error

    def finish(self) -> dict[int, Exception]:
        """Wait until all are sent; by rank, what went wrong. Once more, there is nothing left to wait for."""
        # By one at a time: a work that is waited for twice is never over.
        with self._finishing:
            while self._posted:
                rank, works, _ = self._posted[0]
                self.reached.append(rank)
                try:
                    for one in works:
                        one.wait(_ENDLESS)
                except Exception as error:  # noqa: BLE001 (as above)
                    self._errors[rank] = error
                self._posted.popleft()
        return self._errors


class _Space(NamedTuple):
    """Memory for what comes. `parcel`: what it lies in, where that is used again."""

    memory: NDArray[np.uint8]
    parcel: _native.SendBuffer | None = None


class GlooReceiver:
    """A receiver's end of the way from its source, the first of `group`.

    `group`: gloo's own. What a caller has torch do with all that comes through its dispatcher is not meant for these.
    `passes_on`: whether others are to get what comes from this rank.
    """

    def __init__(
        self,
        group: Any,
        courier: Courier,
        arena: _native.SegmentArena,
        *,
        passes_on: bool,
    ) -> None:
        self._passes_on = passes_on
        self._group = group
        self._courier = courier
        self._arena = arena
        self._known = Known()
        self._job: Job[tuple[Head, ReceivedBatch | str]] | None = None
        self._kept: list[weakref.ref[Any]] = []
        # The form of the last batch; what the next one is likely to be, where it is worth getting ready for.
        self._last: BufferLayout | None = None
        self._likely: Schema | None = None
        # Bytes for which there is room behind the next head; where it is, if what comes there is always copied.
        self._behind = 0
        self._scratch = np.empty(0, np.uint8)

    def wait(self, seconds: float) -> bool:
        """Whether a message is there within so many seconds."""
        # In this order, as Ctrl-C may come in between: a message that a job takes which nobody knows is lost.
        job = self._job
        if job is None:
            job = self._job = Job(self._receive)
        if not job.is_begun:
            self._courier.begin(job)
        return job.wait(seconds)

    def read(self) -> tuple[Head, ReceivedBatch | str]:
        """The message that is there, with its batch or its text, until it is `done` with.

        Where that fails it is gone.
        """
        if self._job is None:
            raise RuntimeError("a message is read before it was waited for")
        try:
            return self._job.result()
        except Exception:
            self._job = None
            raise

    def done(self) -> None:
        """Be done with the message that was read: the next one is the one after it. Once more, it is nothing."""
        self._job = None

    def _receive(self) -> tuple[Head, ReceivedBatch | str]:
        first = self._first_space()
        spaces = [first]
        coming = self._get(first.memory)
        try:
            # While the source still has to take the batch apart.
            ready = None if self._likely is None else self._made_ready(self._likely, spaces)
            coming.wait(_ENDLESS)
            head = Head.unpack(first.memory[:HEAD_BYTES].tobytes())
            said = first.memory[HEAD_BYTES : HEAD_BYTES + head.said]
            if HEAD_BYTES + head.said > _FIRST_BYTES:
                said = np.empty(head.said, np.uint8)
                self._get(said).wait(_ENDLESS)
            if head.kind != BATCH:
                return head, said.tobytes().decode(errors="replace")
            self._behind = head.size if head.flags & JOINING else 0
            schema = self._known.hear(head, said.tobytes())
            if not head.size or head.flags & DIRECT:
                return head, ReceivedBatch(schema, None)
            self._expect(schema)
            return self._batch(head, schema, ready, spaces)
        finally:
            for space in spaces:
                self._leave(space)

    def _made_ready(self, schema: Schema, spaces: list[_Space]) -> ReceivedBatch | None:
        """A batch of this form before its bytes are there: they come behind the head, or else to a space of its own."""
        size = schema.layout.total
        if self._behind != size:
            try:
                spaces.append(self._space(size))
            except _NO_ROOM:
                # What comes may need less.
                return None
            return ReceivedBatch(schema, spaces[-1].memory).prepared(None)
        return ReceivedBatch(schema, spaces[0].memory[_FIRST_BYTES:]).prepared(None)

    def _batch(
        self, head: Head, schema: Schema, ready: ReceivedBatch | None, spaces: list[_Space]
    ) -> tuple[Head, ReceivedBatch | str]:
        """The batch whose head has come, or what its seal says in its place."""
        is_there, size = bool(head.flags & JOINED), schema.layout.total
        behind = spaces[0].memory[_FIRST_BYTES:]
        if ready is not None and ready.schema.layout is schema.layout:
            arrival = ready.filled(schema)
        elif is_there and not self._passes_on and 2 * size >= len(behind):
            # Of a smaller one, whoever keeps it would keep all of the space.
            arrival = ReceivedBatch(schema, behind[:size])
        else:
            spaces.append(self._space(size))
            arrival = ReceivedBatch(schema, spaces[-1].memory, spaces[-1].parcel if self._passes_on else None)
        memory = arrival.memory
        assert memory is not None  # noqa: S101 (for the type checker)
        works: list[Any] = []
        seal: NDArray[np.uint8] | None = None
        if not is_there:
            works = [self._get(memory[piece.start : piece.stop]) for piece in _pieces(schema.layout)]
            if _is_sealed(schema.layout):
                seal = np.empty(_FIRST_BYTES, np.uint8)
                works.append(self._get(seal))
        elif memory.ctypes.data != behind.ctypes.data:
            memory[:size] = behind[:size]
        if arrival.tensors is None and not self._passes_on:
            # While the bytes are on their way.
            arrival = arrival.prepared(None)
        for work in works:
            work.wait(_ENDLESS)
        if seal is None or not seal[0]:
            return head, arrival
        told = seal[1:].tobytes()
        head = Head.unpack(told)
        return head, told[HEAD_BYTES : HEAD_BYTES + head.said].decode(errors="replace")

    def _expect(self, schema: Schema) -> None:
        """Take note of what came: for the third batch of one form and all later ones everything is ready beforehand."""
        is_again = schema.layout is self._last
        self._last = schema.layout
        is_worth_it = is_again and not self._passes_on and len(schema.layout.sizes) >= _MANY
        self._likely = schema if is_worth_it else None

    def _first_space(self) -> _Space:
        """For a head, and what may be behind it."""
        size = _FIRST_BYTES + self._behind
        if self._passes_on:
            # All of it is copied to where others get it.
            if len(self._scratch) < size:
                self._scratch = np.empty(size, np.uint8)
            return _Space(self._scratch[:size])
        if self._behind and self._may_share():
            # What comes may need none of it.
            with contextlib.suppress(*_NO_ROOM):
                return self._space(size)
        return _Space(np.empty(size, np.uint8))

    def _space(self, size: int) -> _Space:
        is_warm = self._passes_on or (size > _FIRST_BYTES and self._may_share())
        parcel = self._arena.take(size) if is_warm else None
        return _Space(np.empty(size, np.uint8)) if parcel is None else _Space(bytes_of(parcel)[:size], parcel)

    def _leave(self, space: _Space) -> None:
        if space.parcel is not None and not self._passes_on:
            # Used again when nothing of the batch is left, which is when nobody has the export any more.
            space.parcel.release()
            self._kept.append(weakref.ref(space.memory.base))

    def _may_share(self) -> bool:
        """Whether there may be one more batch in memory that is used again."""
        self._kept = [kept for kept in self._kept if kept() is not None]
        return len(self._kept) < MOST_HELD

    def _get(self, memory: NDArray[np.uint8]) -> Any:
        return self._group.recv([torch.from_numpy(memory)], 0, _TAG)


def _joining(layout: BufferLayout) -> int:
    """Bytes of a batch that a message can hold together with its head; 0 where they come by themselves."""
    pieces = _pieces(layout)
    if len(pieces) != 1 or layout.total > _MOST_JOINED:
        return 0
    return 0 if pieces[0].is_large else layout.total
