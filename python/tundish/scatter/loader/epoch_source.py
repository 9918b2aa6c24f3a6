"""One iteration over an epoch on the source: it reads batches and sends them.

To each receiver an iteration is a note that it begins, steps, and one message that ends it: a note or an error. The
receivers read all of them, also where their callers left.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch

from tundish.errors import PeerStoppedError
from tundish.scatter.loader.batch_reader import BatchReader, Tail, steps_of
from tundish.scatter.loader.early_exit import EarlyExits
from tundish.scatter.source import ScatterSource
from tundish.scatter.target_device import with_tensors_on
from tundish.tree import flatten_with_addresses

__all__ = ["Epoch", "EpochSource", "EpochStart", "NoteKind", "Step", "as_it_is", "stopped"]

# How often a source that leaves out batches says that it is alive.
_ALIVE_SECONDS = 1.0


class NoteKind(StrEnum):
    """The notes of an iteration."""

    BEGIN = "begin"
    """It begins; with an `EpochStart`."""
    ALIVE = "alive"
    """The source is still leaving out batches."""
    TAIL = "tail"
    """Only so many batches of the next step are new."""
    END = "end"
    """All steps were sent."""
    STOPPED = "stopped"
    """A rank left after so many steps."""


class EpochStart(NamedTuple):
    """Where an iteration begins.

    Attributes:
        epoch: the number of its epoch.
        done: how many of the epoch's batches are left out.
        length: how many batches the source's loader has; None where that is not known.
    """

    epoch: int
    done: int
    length: int | None


class Step(NamedTuple):
    """What a rank gets in one step.

    Attributes:
        batch: makes the batch, on the caller's thread; None where the rank gets none.
        is_padding: whether the batch was handed out before.
        done: how many batches of the epoch were drawn by now.
        state: of the source's loader after them; None on other ranks and where it has none.
        size: bytes of the batch, where they are counted.
    """

    batch: Callable[[], Any] | None
    is_padding: bool
    done: int
    state: Any
    size: int


class Epoch(Protocol):
    """One iteration over an epoch, on the source or on a receiver. One thread at a time calls it.

    Attributes:
        start: where it begins; None as long as a receiver does not know.
        reading_seconds: seconds spent in the source's loader.
        last_heard: when another rank was last heard of, as `time.monotonic` has it.
    """

    start: EpochStart | None
    reading_seconds: float
    last_heard: float

    def next_step(self) -> Step | None:
        """The next step; None after the last one. Raises what ends the iteration otherwise."""

    def finish(self) -> None:
        """The caller took all steps."""

    def report_exit(self, steps: int, /) -> None:
        """The caller left after so many steps. On the caller's thread."""

    def leave(self, steps: int, /) -> None:
        """After `report_exit`: be ready for the next iteration."""

    def steps_before(self, error: BaseException) -> int | None:
        """How many steps the caller may still get, in all, before this error; None for all that are there."""

    def check_peers(self) -> None:
        """Raise where another rank is gone."""


class EpochSource:
    """An `Epoch` on the source. Call `begin` first, on the caller's thread.

    Args:
        session: sends the batches.
        exits: the early exits of this loader; None in a process that is alone.
        iteration: the number of the iteration.
        device: where this rank's batches go.
        tail: what becomes of the last batches.
        counts_bytes: whether the bytes of this rank's own batch are counted; those of the others are known.
    """

    def __init__(
        self,
        session: ScatterSource,
        exits: EarlyExits | None,
        iteration: int,
        device: torch.device | None,
        *,
        tail: Tail,
        counts_bytes: bool,
    ) -> None:
        self.start: EpochStart | None = None
        self.reading_seconds = 0.0
        self.last_heard = time.monotonic()
        self._session = session
        self._exits = exits
        self._iteration = iteration
        self._device = device
        self._tail = tail
        self._counts_bytes = counts_bytes
        self._reader: BatchReader | None = None
        self._done = 0
        self._steps = 0
        # As the loader's length has it; None where that is not known.
        self._expected_steps: int | None = None
        self._is_end_read = False
        self._caller_left = False
        self._is_over = False
        # After how many steps the loop ends, where that is known.
        self._ends_after: int | None = None
        self._said_alive_at = time.monotonic()

    def begin(
        self, start: Callable[[], EpochStart], read: Callable[[Callable[[], None]], BatchReader]
    ) -> None:
        """Tell the receivers where the iteration begins, and begin to read.

        `read` is given a function to call now and then while it leaves out batches. What `start` and `read` raise is
        raised on all ranks.
        """
        with self._error_ends_it():
            self.start = start()
            self._done = self.start.done
            if self.start.length is not None:
                left = max(0, self.start.length - self.start.done)
                self._expected_steps = steps_of(left, self._session.participants.batches, self._tail)
            self._note(NoteKind.BEGIN, *self.start)
            begin = time.monotonic()
            try:
                self._reader = read(self._say_alive)
            finally:
                self.reading_seconds += time.monotonic() - begin
            if self._exits is not None:
                self._exits.forget(self._iteration - 1)

    def next_step(self) -> Step | None:
        with self._error_ends_it():
            self._look_for_exits()
            self._session.check_peers()
            return self._read_and_send()

    def finish(self) -> None:
        with self._error_ends_it():
            # Another rank may have left before the end meanwhile.
            self._look_for_exits()
            self._over(self._steps)
            self._note(NoteKind.END)

    def report_exit(self, _: int, /) -> None:
        self._caller_left = True

    def leave(self, steps: int, /) -> None:
        if not self._is_over:
            self._over(steps)
            if self._are_all(steps):
                self._note(NoteKind.END)
            else:
                self._note(NoteKind.STOPPED, self._session.participants.rank, steps)

    def steps_before(self, error: BaseException) -> int | None:
        return 0 if error is self._session.lost else self._ends_after

    def check_peers(self) -> None:
        with self._error_ends_it():
            self._session.check_peers()

    def _look_for_exits(self) -> None:
        found = None if self._exits is None else self._exits.find(self._iteration)
        # A rank that left after the last step has missed nothing.
        if found is not None and not self._are_all(found[1]):
            rank, steps = found
            self._over(steps)
            self._note(NoteKind.STOPPED, rank, steps)
            raise stopped(rank)

    def _read_and_send(self) -> Step | None:
        session, reader = self._session, self._reader
        begin = time.monotonic()
        try:
            drawn = None if reader is None else reader.draw()
        finally:
            self.reading_seconds += time.monotonic() - begin
        if self._caller_left:
            return None
        if drawn is None:
            self._is_end_read = True
            return None
        self._done += drawn.new
        if drawn.new < len(drawn.batches):
            self._note(NoteKind.TAIL, drawn.new)
        own = session.send(drawn.batches, self._device)
        self._steps += 1
        size = session.largest_batch
        if own is None:
            return Step(None, False, self._done, drawn.state, size)
        make = functools.partial(as_it_is, own)
        if self._device is not None:
            tensors, schema, _ = flatten_with_addresses(own)
            make = functools.partial(with_tensors_on, schema, tensors, self._device)
        if self._counts_bytes:
            # A batch that stays here need not be of types that can be sent.
            with contextlib.suppress(Exception):
                size = max(size, flatten_with_addresses(own)[1].layout.total)
        is_padding = session.participants.batch(session.participants.rank) >= drawn.new
        return Step(make, is_padding, self._done, drawn.state, size)

    @contextlib.contextmanager
    def _error_ends_it(self) -> Iterator[None]:
        """A block whose error ends the iteration on all ranks."""
        try:
            yield
        except BaseException as error:
            was_reported = self._session.was_reported(error)
            if self._ends_after is None:
                self._over(0 if error is self._session.lost else self._steps)
                if not was_reported:
                    self._session.fail(error)
            raise

    def _over(self, ends_after: int) -> None:
        self._is_over, self._ends_after, self._reader = True, ends_after, None

    def _are_all(self, steps: int) -> bool:
        """Whether so many steps are all; before the end is read, as far as the loader's length tells."""
        return steps == self._steps and (self._is_end_read or steps == self._expected_steps)

    def _say_alive(self) -> None:
        now = time.monotonic()
        if now - self._said_alive_at > _ALIVE_SECONDS:
            self._said_alive_at = now
            self._note(NoteKind.ALIVE)

    def _note(self, kind: NoteKind, *values: Any) -> None:
        self._session.send_note(json.dumps((kind, *values)))


def stopped(rank: int) -> PeerStoppedError:
    """The error of a rank that goes on where another one left the loop."""
    return PeerStoppedError(
        f"rank {rank} left the loop over the loader before its end, and this rank goes on: all ranks end it alike",
        rank,
    )


def as_it_is(batch: Any) -> Any:
    """The batch."""
    return batch
