"""From the source to ranks of other nodes: messages of a gloo group that belongs to the scatter alone.

A `Courier` owns the thread that waits for them, which Ctrl-C does not reach. What always holds:

1. A round is, for each receiver, its head first, then the schema where that does not fit into it, then the tensors:
   those that are small together in one message, large ones from where they are and to where they stay, without a copy.
2. All messages of a round are under way before one is waited for. What is sent is held until it was.
3. A caller whose wait is ended leaves a round to the thread; the next one begins after it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from tundish import _native
from tundish.scatter.arrival import Arrival, bytes_of
from tundish.scatter.departure import Departure
from tundish.scatter.messages import BATCH, DIRECT, HEAD_BYTES, Head, Known, Told
from tundish.tree.layout import Layout

__all__ = ["ENDLESS", "Courier", "FarEnd", "FarLane", "Job", "send"]

# gloo knows no other way to say so.
ENDLESS = timedelta(days=365)
# Room for the head and what is said with it; gloo takes hardly longer for it than for one byte.
_FIRST_BYTES = 4096
# Larger tensors are messages of their own.
_LARGE = 1 << 20
_TAG = 0

T = TypeVar("T")


class Piece(NamedTuple):
    """A message with tensors: those of these numbers, `start` to `stop` in the layout's buffer."""

    start: int
    stop: int
    numbers: list[int]


class Job(Generic[T]):
    """Something that a courier does; `wait` for it, then take its `result`."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._over = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:  # noqa: BLE001 (raised where the result is taken)
            self._error = error
        finally:
            del self._work
            self._over.set()

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
        threading.Thread(target=_serve, args=(self._jobs,), name="tundish-scatter", daemon=True).start()

    def do(self, work: Callable[[], T]) -> Job[T]:
        job = Job(work)
        self._jobs.put(job)
        return job


def _pieces(layout: Layout) -> Iterator[Piece]:
    """How the tensors of a layout are cut into messages, at both ends."""
    numbers: list[int] = []
    for number, (start, size) in enumerate(zip(layout.offsets, layout.sizes, strict=True)):
        if size >= _LARGE:
            if numbers:
                yield Piece(layout.offsets[numbers[0]], start, numbers)
                numbers = []
            yield Piece(start, start + size, [number])
        elif size:
            numbers.append(number)
    if numbers:
        yield Piece(layout.offsets[numbers[0]], layout.total, numbers)


class FarLane:
    """The source's end of the way to `rank`, which has `position` in `group`."""

    def __init__(self, rank: int, group: Any, position: int, arena: _native.SegmentArena) -> None:
        self.rank = rank
        self._group = group
        self._position = position
        self._arena = arena
        self._told = Told()

    def post(
        self, number: int, content: Departure | tuple[int, str], is_direct: bool
    ) -> tuple[list[Any], list[Any]]:
        """Have a batch, or a kind and a text, sent; the sends, and what has to live until they are over.

        `is_direct`: whether tensors go from device to device, and here only what is said of them.
        """
        if isinstance(content, Departure):
            flags, place, said = self._told.tell(content.schema)
            head = Head(number, BATCH, flags, place, len(said), content.size)
        else:
            said = content[1].encode(errors="replace")
            head = Head(number, content[0], said=len(said))
        if is_direct:
            head = head._replace(flags=head.flags | DIRECT)
        fits = HEAD_BYTES + len(said) <= _FIRST_BYTES
        message = (head.pack() + (said if fits else b"")).ljust(_FIRST_BYTES, b"\0")
        sends: list[Any] = []
        held: list[Any] = []

        def post(tensor: torch.Tensor) -> None:
            held.append(tensor)
            sends.append(self._group.send([tensor], self._position, _TAG))

        post(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        if not fits:
            post(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        if isinstance(content, Departure) and not is_direct:
            for piece in _pieces(content.schema.layout):
                post(self._tensor(content, piece))
        return sends, held

    def _tensor(self, departure: Departure, piece: Piece) -> torch.Tensor:
        """The bytes of a piece: where they are, or written into warm memory one after the other."""
        tensor = departure.tensors[piece.numbers[0]]
        if len(piece.numbers) == 1 and tensor.is_cpu and tensor.is_contiguous():
            return tensor.reshape(-1).view(torch.uint8)
        parcel = self._arena.take(piece.stop - piece.start)
        try:
            departure.write_some(parcel, piece.numbers, piece.start)
            return torch.from_numpy(bytes_of(parcel))
        finally:
            # Used again when torch has let go of it.
            parcel.release()


def send(
    number: int, contents: list[tuple[FarLane, Departure | tuple[int, str]]], is_direct: bool = False
) -> dict[int, Exception]:
    """Send each receiver its batch or text, or what is said of it; by rank, what went wrong."""
    errors: dict[int, Exception] = {}
    posted = []
    for lane, content in contents:
        try:
            posted.append((lane.rank, *lane.post(number, content, is_direct)))
        except Exception as error:  # noqa: BLE001 (the other receivers get theirs)
            errors[lane.rank] = error
    for rank, sends, _ in posted:
        try:
            for one in sends:
                one.wait()
        except Exception as error:  # noqa: BLE001 (as above)
            errors[rank] = error
    return errors


class FarEnd:
    """A receiver's end of the way from its source, the first of `group`.

    `timeout`: how long a message is waited for. `passes_on`: whether others are to get what comes from this rank.
    """

    def __init__(
        self,
        group: Any,
        courier: Courier,
        arena: _native.SegmentArena,
        *,
        timeout: timedelta,
        passes_on: bool,
    ) -> None:
        self._timeout = timeout
        self._passes_on = passes_on
        self._group = group
        self._courier = courier
        self._arena = arena
        self._known = Known()
        self._job: Job[tuple[Head, Arrival | str]] | None = None

    def wait(self, seconds: float) -> bool:
        """Whether a message is there within so many seconds."""
        if self._job is None:
            self._job = self._courier.do(self._receive)
        return self._job.wait(seconds)

    def read(self) -> tuple[Head, Arrival | str]:
        """The message that is there, with its batch or its text. Where that fails it is gone."""
        job, self._job = self._job, None
        if job is None:
            raise RuntimeError("a message is read before it was waited for")
        return job.result()

    def _receive(self) -> tuple[Head, Arrival | str]:
        message = bytearray(_FIRST_BYTES)
        self._get(torch.frombuffer(message, dtype=torch.uint8)).wait(self._timeout)
        head = Head.unpack(message)
        said = message[HEAD_BYTES : HEAD_BYTES + head.said]
        if HEAD_BYTES + head.said > _FIRST_BYTES:
            said = bytearray(head.said)
            self._get(torch.frombuffer(said, dtype=torch.uint8)).wait(self._timeout)
        if head.kind != BATCH:
            return head, said.decode(errors="replace")
        schema = self._known.hear(head, said)
        if not head.size or head.flags & DIRECT:
            return head, Arrival(schema, None)
        parcel = self._arena.take(head.size)
        try:
            memory = bytes_of(parcel)
            whole = torch.from_numpy(memory)
            for work in [self._get(whole[piece.start : piece.stop]) for piece in _pieces(schema.layout)]:
                work.wait(self._timeout)
        finally:
            if not self._passes_on:
                # Used again when nothing of the batch is left.
                parcel.release()
        return head, Arrival(schema, memory, parcel if self._passes_on else None)

    def _get(self, tensor: torch.Tensor) -> Any:
        return self._group.recv([tensor], 0, _TAG)
