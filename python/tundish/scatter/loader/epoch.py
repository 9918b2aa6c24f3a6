"""One pass through the data, as its source and as its receivers make its rounds.

What always holds:

1. A pass is, for every receiver, a note that it begins, rounds, and one message that ends it: a note, or an error. All
   are read, also by a receiver whose caller has left.
2. The last, incomplete round follows a note of how many of its batches are new.
3. A source whose caller leaves while its loader is being read says so at once, from a thread of its own; nobody else
   uses the ways to the others meanwhile.
4. A source that hears of a rank that left ends the pass for all. From then on, and from any other end on, each rank
   looks for itself, as long as its caller has rounds to take, whether another one has left after fewer.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from tundish.errors import PeerFailedError, PeerStoppedError
from tundish.scatter.loader.batch_reader import BatchReader, Tail, rounds_of
from tundish.scatter.received_batch import ReceivedBatch, on_device
from tundish.scatter.source import Note, ScatterSession
from tundish.scatter.stops import Stops, StopWatch
from tundish.tree import flatten_with_addresses
from tundish.waiting import Thread, was_let_go

__all__ = ["Pass", "ReceiverPass", "Round", "SourcePass", "Start"]

# How often a source that leaves out what was trained on says that it is there.
_ALIVE_SECONDS = 1.0
# How long the caller of a receiver may be behind the end of a pass before somebody looks who else has left.
_BEHIND_SECONDS = 0.5
# How many messages in a row cannot be read where there is no sense in reading on.
_MOST_FAILURES = 8

_BEGIN, _ALIVE, _TAIL, _END, _STOPPED = "begin", "alive", "tail", "end", "stopped"


class Start(NamedTuple):
    """Where a pass begins, as the source tells it.

    Attributes:
        epoch: number of the pass's epoch.
        done: how many of its batches are left out.
        length: how many batches the loader has; None where nobody knows.
    """

    epoch: int
    done: int
    length: int | None


class Round(NamedTuple):
    """What a rank gets of a round.

    Attributes:
        batch: makes its batch, on the caller's thread; None where it has none.
        is_padding: whether the batch was there before.
        done: how many batches of the epoch were drawn by now.
        state: of the source's loader, after them; None on the others and where it keeps none.
        size: bytes of the batch, where somebody counts them.
    """

    batch: Callable[[], Any] | None
    is_padding: bool
    done: int
    state: Any
    size: int


class Pass(Protocol):
    """A pass at either end. One thread at a time calls, but for `depart`, which any may.

    `start`: where it begins; None as long as a receiver does not know. `touch`: called with each sign of life.
    `reading_seconds`: time spent in the loader.
    """

    start: Start | None
    reading_seconds: float
    touch: Callable[[], None]

    def step(self) -> Round | None:
        """The next round; None at the end. Raises what ends it otherwise."""

    def finish(self) -> None:
        """The caller has gone through all rounds, unless it has departed."""

    def depart(self, rounds: int) -> None:
        """The caller wants no more after so many rounds."""

    def leave(self, rounds: int, /) -> None:
        """After that: be in step for the next pass."""

    def rounds_before(self, error: BaseException) -> int | None:
        """How many rounds are of use, of those before this error; None for all, where it is this rank's alone."""

    def look(self) -> None:
        """Between rounds, and after the last: raise where there is no sense in waiting for the caller."""


class SourcePass:
    """A pass on the source. `begin` it first, on the caller's thread.

    `tail`: what becomes of the last batches. `counts_bytes`: whether the bytes of its own batch are of interest; those
    of the others are known.
    """

    def __init__(
        self,
        scatterer: ScatterSession,
        stops: Stops | None,
        number: int,
        device: torch.device | None,
        *,
        tail: Tail,
        counts_bytes: bool,
    ) -> None:
        self.start: Start | None = None
        self.touch: Callable[[], None] = lambda: None
        self.reading_seconds = 0.0
        self._scatterer = scatterer
        self._stops = stops
        self._number = number
        self._done = 0
        self._device = device
        self._tail = tail
        self._counts_bytes = counts_bytes
        self._reading: BatchReader | None = None
        self._watch: StopWatch | None = None
        self._rounds = 0
        self._rounds_in_all: int | None = None
        # What the loader said beforehand of its rounds.
        self._rounds_expected: int | None = None
        self._is_over = False
        # After how many rounds, once all were told so.
        self._ends_after: int | None = None
        self._spoke_at = time.monotonic()
        self._lock = threading.Lock()
        self._departed_after: int | None = None
        self._is_reading = False
        self._telling: threading.Thread | None = None

    def begin(self, start: Callable[[], Start], read: Callable[[Callable[[], None]], BatchReader]) -> None:
        """Tell the others where it begins, and begin to read.

        `read` gets what it is to call now and then while that takes long. Raises what the two raise, once the others
        know.
        """
        with self._told_to_all():
            self.start = begins = start()
            self._done = begins.done
            if begins.length is not None:
                left = max(0, begins.length - begins.done)
                self._rounds_expected = rounds_of(left, self._scatterer.place.batches, self._tail)
            self._say(_BEGIN, *begins)
            begin = time.monotonic()
            try:
                self._reading = read(self._be_alive)
            finally:
                self.reading_seconds += time.monotonic() - begin
            if self._stops is not None:
                self._watch = self._stops.watch(self._number)

    def step(self) -> Round | None:
        with self._told_to_all():
            self._look()
            return self._next()

    def finish(self) -> None:
        if self._rounds_in_all is None:
            # That there are no more rounds is since the caller has left, as `leave` tells: it is no end of the data.
            return
        with self._told_to_all():
            self._look()
            self._say(_END)
            self._end()
            self._ends_after = self._rounds
            self._unwatch()

    def depart(self, rounds: int) -> None:
        self._departed_after = rounds
        if not self._is_reading:
            # It is seen before anything more is read.
            return
        # An interpreter that ends starts no threads any more; the others see it end.
        with contextlib.suppress(RuntimeError):
            Thread(self._tell_aside, "tundish-dispatch-leave").start()

    def leave(self, rounds: int, /) -> None:
        try:
            if not self._is_over:
                self._stop(rounds)
            elif self._stops is not None and self._ends_after is not None and rounds < self._ends_after:
                # The others were told of more.
                self._stops.announce(self._number, rounds)
        finally:
            self._unwatch()

    def look(self) -> None:
        with self._told_to_all():
            self._look()

    def _look(self) -> None:
        found = None if self._watch is None else self._watch.found
        if self._ends_after is not None:
            # The others look for themselves.
            if found is not None and found[1] < self._ends_after:
                rank, self._ends_after = found
                raise stopped(rank)
            return
        # Whoever has left after the last round has left nothing out.
        if found is not None and not self._are_all(found[1]):
            rank, rounds = found
            self._end()
            self._say(_STOPPED, rank, rounds)
            self._ends_after = rounds
            raise stopped(rank)
        self._scatterer.look()

    def rounds_before(self, error: BaseException) -> int | None:
        return 0 if error is self._scatterer.lost else self._ends_after

    def _next(self) -> Round | None:
        scatterer, reading = self._scatterer, self._reading
        if reading is None:
            return None
        begin = time.monotonic()
        with self._lock:
            self._is_reading = True
        try:
            drawn = None if self._departed_after is not None else reading.draw()
        finally:
            self.reading_seconds += time.monotonic() - begin
            with self._lock:
                self._is_reading = False
            if self._telling is not None:
                self._telling.join()
        if self._departed_after is not None:
            return None
        if drawn is None:
            self._rounds_in_all = self._rounds
            return None
        self._done += drawn.new
        if drawn.new < len(drawn.batches):
            self._say(_TAIL, drawn.new)
        own = scatterer.give(drawn.batches, self._device)
        self._rounds += 1
        size = scatterer.largest
        if own is None:
            return Round(None, False, self._done, drawn.state, size)
        make = functools.partial(_as_it_is, own)
        if self._device is not None:
            tensors, schema, _ = flatten_with_addresses(own)
            make = functools.partial(on_device, schema, tensors, self._device)
        if self._counts_bytes:
            # What cannot be sent need not be, where nobody else is.
            with contextlib.suppress(Exception):
                size = max(size, flatten_with_addresses(own)[1].layout.total)
        is_padding = scatterer.place.batch(scatterer.place.rank) >= drawn.new
        return Round(make, is_padding, self._done, drawn.state, size)

    @contextlib.contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """A block whose error ends the pass, for all."""
        try:
            yield
        except BaseException as error:
            if was_let_go(error):
                # Whoever was interrupted has left the pass, and there may be another by now.
                raise
            self._end()
            has_told = self._scatterer.has_told(error)
            # An error that a loader raises may be of any kind.
            if self._ends_after is None:
                self._ends_after = 0 if error is self._scatterer.lost else self._rounds
                if not has_told:
                    self._scatterer.fail(error)
            raise

    def _end(self) -> None:
        self._is_over = True
        self._reading = None

    def _stop(self, rounds: int) -> None:
        self._end()
        if self._are_all(rounds):
            # Nothing was left out.
            self._say(_END)
        else:
            self._say(_STOPPED, self._scatterer.place.rank, rounds)
        self._ends_after = rounds

    def _are_all(self, rounds: int) -> bool:
        """Whether so many rounds are all of the data; as long as its end was not read, as far as its length tells."""
        if self._rounds_in_all is not None:
            return rounds == self._rounds_in_all
        return rounds == self._rounds_expected == self._rounds

    def _tell_aside(self) -> None:
        with self._lock:
            if not self._is_reading or self._telling is not None or self._departed_after is None:
                return
            self._telling = threading.current_thread()
        with contextlib.suppress(Exception):
            self._stop(self._departed_after)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _be_alive(self) -> None:
        now = time.monotonic()
        if now - self._spoke_at > _ALIVE_SECONDS:
            self._spoke_at = now
            self._say(_ALIVE)

    def _say(self, *words: Any) -> None:
        self._scatterer.note(json.dumps(words))


class ReceiverPass:
    """A pass on a receiver."""

    def __init__(
        self, scatterer: ScatterSession, stops: Stops, number: int, device: torch.device | None
    ) -> None:
        self.start: Start | None = None
        self.reading_seconds = 0.0
        self.touch: Callable[[], None] = lambda: None
        self._scatterer = scatterer
        self._stops = stops
        self._number = number
        self._device = device
        self._done = 0
        self._new: int | None = None
        self._rounds = 0
        # After how many rounds, and when it was heard; as long as it goes on None.
        self._ends_after: int | None = None
        self._ended_at = 0.0
        self._watch: StopWatch | None = None

    def step(self) -> Round | None:
        came = self._take()
        while isinstance(came, Note):
            if self._ends_after is not None:
                return None
            came = self._take()
        if came is None:
            return Round(None, False, self._done, None, 0)
        place = self._scatterer.place
        is_padding = self._new is not None and place.batch(place.rank) >= self._new
        return Round(self._made(came), is_padding, self._done, None, came.schema.layout.total)

    def finish(self) -> None:
        pass

    def depart(self, rounds: int) -> None:
        if self._ends_after is None or rounds < self._ends_after:
            self._stops.announce(self._number, rounds)

    def leave(self, _: int, /) -> None:
        failures = 0
        while self._ends_after is None and failures < _MOST_FAILURES:
            # Of a type that is not known here, say, or without memory for it.
            try:
                self._take()
                failures = 0
            except Exception:  # noqa: BLE001 (nobody is there to be told)
                failures += 1
        if self._watch is not None:
            self._watch.close()

    def rounds_before(self, error: BaseException) -> int | None:
        return 0 if error is self._scatterer.lost else self._ends_after

    def look(self) -> None:
        if self._ends_after is None or time.monotonic() - self._ended_at < _BEHIND_SECONDS:
            return
        if self._watch is None:
            self._watch = self._stops.watch(self._number)
        found = self._watch.found
        if found is not None and found[1] < self._ends_after:
            rank, self._ends_after = found
            raise stopped(rank)

    def _take(self) -> ReceivedBatch | Note | None:
        """The next message, which was heard where it is a note."""
        try:
            came = self._scatterer.take()
            self.touch()
            if isinstance(came, Note):
                self._hear(*json.loads(came.text))
            else:
                self._done += self._scatterer.place.batches if self._new is None else self._new
                self._rounds += 1
        except PeerFailedError as error:
            self._end(0 if error is self._scatterer.lost else self._rounds)
            raise
        return came

    def _end(self, rounds: int) -> None:
        self._ends_after, self._ended_at = rounds, time.monotonic()

    def _made(self, came: ReceivedBatch) -> Callable[[], Any]:
        """How the caller gets a batch, of which what can be done before is done."""
        if self._device is None:
            return functools.partial(_as_it_is, came.build(None))
        # Onto the caller's stream, so that what uses the batch there comes after the copy.
        return functools.partial(came.staged(self._device).build, self._device)

    def _hear(self, word: str, *values: Any) -> None:
        if word == _BEGIN:
            self.start = Start(*values)
            self._done = self.start.done
        elif word == _TAIL:
            (self._new,) = values
        elif word == _END:
            self._end(self._rounds)
        elif word == _STOPPED:
            rank, rounds = values
            self._end(rounds)
            raise stopped(rank)


def stopped(rank: int) -> PeerStoppedError:
    return PeerStoppedError(
        f"rank {rank} left the loop over the loader before its end, and this rank goes on: all ranks end it alike",
        rank,
    )


def _as_it_is(batch: Any) -> Any:
    return batch
