"""One iteration over an epoch: `EpochSource` reads batches and sends them, `EpochReceiver` receives them.

To each receiver an iteration is a control message that it begins, steps, and one message that ends it: a control
message or an error. The receivers read all of them, also after their callers left.

A rank whose caller leaves the loop early writes a key to the job's store, which the source reads before each step.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from tundish.daemon_thread import DaemonThread
from tundish.distributed import JobStore
from tundish.errors import PeerFailedError, PeerLeftLoopError
from tundish.progress import ProgressLine
from tundish.scatter.batch_bytes import IncomingBatch
from tundish.scatter.batch_reader import (
    BatchReader,
    StepBatches,
    Tail,
    advances_epoch,
    length_of,
    step_count,
)
from tundish.scatter.steps import ControlMessage, ScatterRank, ScatterReceiver, ScatterSource
from tundish.tree import flatten_with_addresses

# How often a source that skips batches tells the receivers that it is alive.
_ALIVE_SECONDS = 1.0
# A receiver whose caller left stops reading after so many errors in a row.
_MAX_ERRORS = 8
# How long a rank that leaves waits for the store.
_REPORT_SECONDS = 1.0


class ControlKind(StrEnum):
    """The kinds of control messages of an iteration."""

    BEGIN = "begin"
    """It begins; with an `EpochStart`."""
    ALIVE = "alive"
    """The source is still skipping batches."""
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
        skipped: how many of the epoch's batches are skipped.
        length: how many batches the source's loader has; None where that is not known.
    """

    epoch: int
    skipped: int
    length: int | None


class LoaderStep(NamedTuple):
    """One step of a rank.

    Attributes:
        make: makes the batch, on the caller's thread.
        is_padding: whether another rank gets the batch too, because the last batches are too few.
        drawn: how many batches of the epoch were drawn or skipped by now.
        state: of the source's loader after them; None on other ranks and where it has none.
        size: bytes of the batch.
    """

    make: Callable[[], Any]
    is_padding: bool
    drawn: int
    state: Any
    size: int


class Epoch:
    """One iteration over an epoch, on the source or on a receiver. One thread at a time calls it.

    Args:
        scatter: sends or receives the batches.
        early_exits: the early exits of this loader; None in a process that is alone.
        iteration: the number of the iteration.
        device: where this rank's batches go.

    Attributes:
        scatter: as given.
        start: where the iteration begins; None as long as a receiver does not know.
        reading_seconds: seconds spent in the source's loader.
        last_heard: when another rank was last heard of, as `time.monotonic` has it.
    """

    def __init__(
        self,
        scatter: ScatterRank,
        early_exits: EarlyExits | None,
        iteration: int,
        device: torch.device | None,
    ) -> None:
        self.scatter = scatter
        self.start: EpochStart | None = None
        self.reading_seconds = 0.0
        self.last_heard = time.monotonic()
        self._early_exits = early_exits
        self._iteration = iteration
        self._device = device
        # Batches of the epoch and steps of the iteration that were sent or received.
        self._done = self._steps = 0
        # After how many steps the iteration ends; None as long as it goes on.
        self._ends_after: int | None = None

    def next_step(self) -> LoaderStep | None:
        """The next step; None after the last one. Raises the error that ends the iteration early."""
        raise NotImplementedError

    def finish(self) -> None:
        """The caller took all steps."""

    def report_exit(self, steps: int) -> None:
        """The caller left after so many steps. On the caller's thread."""
        raise NotImplementedError

    def leave(self, steps: int) -> None:
        """End the iteration after `report_exit`, so that the next one can begin."""
        raise NotImplementedError

    def check_peers(self) -> None:
        """Raise where another rank is gone."""

    def steps_before_error(self, error: BaseException) -> int | None:
        """Total steps handed out before the error is raised; None for all that are there."""
        return 0 if error is self.scatter.end_error else self._ends_after


class EpochSource(Epoch):
    """An `Epoch` on the source. Call `begin` first, on the caller's thread.

    Args:
        scatter, early_exits, iteration, device: as for `Epoch`.
        loader: the source's loader.
        tail: how the last step is completed.
        progress: whether standard error shows how many batches are skipped.
        counts_bytes: whether steps have the size of this rank's batch, if no batch is sent.
    """

    scatter: ScatterSource

    def __init__(
        self,
        scatter: ScatterSource,
        early_exits: EarlyExits | None,
        iteration: int,
        device: torch.device | None,
        *,
        loader: Any,
        tail: Tail,
        progress: bool | None,
        counts_bytes: bool,
    ) -> None:
        super().__init__(scatter, early_exits, iteration, device)
        self._loader = loader
        self._tail = tail
        self._progress = progress
        self._counts_bytes = counts_bytes
        self._reader: BatchReader | None = None
        # How many steps there are, by the loader's length or because its end was read; None where it is not known.
        self._expected_steps: int | None = None
        self._caller_left = False

    def begin(self, epoch: int, skip: int, state: Any) -> None:
        """Tell the receivers where the iteration begins, and begin to read.

        Args:
            epoch: the number of the epoch.
            skip: how many of its batches are skipped.
            state: the loader's state that stands for them, or None.
        """
        width = self.scatter.participants.batch_count
        with self._ended_by_errors():
            with self._reported_reading():
                if state is None and advances_epoch(self._loader):
                    self._loader.set_epoch(epoch)
                self.start = EpochStart(epoch, skip, length_of(self._loader))
            self._done = skip
            if self.start.length is not None:
                self._expected_steps = step_count(max(0, self.start.length - skip), width, self._tail)
            self._send_control(ControlKind.BEGIN, *self.start)
            with self._reported_reading(), ProgressLine("dispatch", self._progress) as line:
                said_alive_at = time.monotonic()

                def report_progress(done: int, total: int) -> None:
                    nonlocal said_alive_at
                    line.update("skipping batches", done, total)
                    if time.monotonic() - said_alive_at > _ALIVE_SECONDS:
                        said_alive_at = time.monotonic()
                        # Where it fails, so does the first step.
                        with contextlib.suppress(Exception):
                            self._send_control(ControlKind.ALIVE)

                self._reader = BatchReader(
                    self._loader,
                    width=width,
                    tail=self._tail,
                    skip=skip,
                    state=state,
                    report_progress=report_progress,
                )
            if self._early_exits is not None:
                self._early_exits.forget(self._iteration - 1)

    def next_step(self) -> LoaderStep | None:
        with self._ended_by_errors():
            with self._reported_reading():
                drawn = None if self._reader is None else self._reader.draw()
            if drawn is None:
                self._expected_steps = self._steps
                return None
            if self._caller_left:
                return None
            self._raise_if_left_early()
            return self._send(drawn)

    def finish(self) -> None:
        with self._ended_by_errors():
            # Another rank may have left before the end meanwhile.
            self._raise_if_left_early()
            self._set_end(self._steps)
            self._send_control(ControlKind.END)

    def report_exit(self, _: int) -> None:
        self._caller_left = True

    def leave(self, steps: int) -> None:
        if self._ends_after is None:
            self._set_end(steps)
            if self._is_complete_after(steps):
                self._send_control(ControlKind.END)
            else:
                self._send_control(ControlKind.STOPPED, self.scatter.participants.rank, steps)

    def check_peers(self) -> None:
        with self._ended_by_errors():
            self.scatter.check_peers()

    def _send(self, drawn: StepBatches) -> LoaderStep:
        scatter = self.scatter
        if drawn.new < len(drawn.batches):
            self._send_control(ControlKind.TAIL, drawn.new)
        make = scatter.send(drawn.batches, self._device)
        self._done += drawn.new
        self._steps += 1
        number, size = scatter.participants.batch_number(scatter.participants.rank), scatter.largest_batch
        if not size and self._counts_bytes:
            # A batch that stays here need not be of types that can be sent.
            with contextlib.suppress(Exception):
                size = flatten_with_addresses(drawn.batches[number])[1].layout.total
        is_padding = number >= drawn.new
        return LoaderStep(make, is_padding, self._done, drawn.state, size)

    def _raise_if_left_early(self) -> None:
        found = None if self._early_exits is None else self._early_exits.find(self._iteration)
        # A rank that left after the last step has missed nothing.
        if found is not None and not self._is_complete_after(found[1]):
            rank, steps = found
            self._set_end(steps)
            self._send_control(ControlKind.STOPPED, rank, steps)
            raise early_exit_error(rank)

    @contextlib.contextmanager
    def _reported_reading(self) -> Iterator[None]:
        """A block that uses the loader. Its error is reported to all ranks."""
        begin = time.monotonic()
        try:
            yield
        except BaseException as error:
            if self.scatter.end_error is None:
                self.scatter.fail(error)
            raise
        finally:
            self.reading_seconds += time.monotonic() - begin

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """A block whose error ends the iteration. The other ranks know of the error already."""
        try:
            yield
        except BaseException as error:
            if self._ends_after is None:
                self._set_end(0 if error is self.scatter.end_error else self._steps)
            raise

    def _set_end(self, ends_after: int) -> None:
        self._ends_after, self._reader = ends_after, None

    def _is_complete_after(self, steps: int) -> bool:
        return steps == self._steps == self._expected_steps

    def _send_control(self, kind: ControlKind, *values: Any) -> None:
        self.scatter.send_control(json.dumps((kind, *values)))


class EpochReceiver(Epoch):
    """An `Epoch` on a receiver."""

    scatter: ScatterReceiver
    # How many batches of the last step are new; None before the source has said so.
    _new: int | None = None

    def next_step(self) -> LoaderStep | None:
        received = self._receive()
        while isinstance(received, ControlMessage):
            if self._ends_after is not None:
                return None
            received = self._receive()
        if received is None:
            return LoaderStep(lambda: None, False, self._done, None, 0)
        participants, device = self.scatter.participants, self._device
        is_padding = self._new is not None and participants.batch_number(participants.rank) >= self._new
        size = received.schema.layout.total
        if device is None:
            batch = received.build(None)
            return LoaderStep(lambda: batch, is_padding, self._done, None, size)
        # On the caller's stream, so that its work on the batch comes after the copy.
        pinned = received.pinned(device)
        return LoaderStep(lambda: pinned.build(device), is_padding, self._done, None, size)

    def report_exit(self, steps: int) -> None:
        if self._early_exits is not None and (self._ends_after is None or steps < self._ends_after):
            self._early_exits.report(self._iteration, steps)

    def leave(self, _: int) -> None:
        errors = 0
        while self._ends_after is None and errors < _MAX_ERRORS:
            # A type that is not known here, for example, or no memory for a batch.
            try:
                self._receive()
                errors = 0
            except Exception:  # noqa: BLE001 (the caller has left)
                errors += 1

    def _receive(self) -> IncomingBatch | ControlMessage | None:
        """The next message. Handles control messages."""
        try:
            received = self.scatter.receive()
            self.last_heard = time.monotonic()
            if isinstance(received, ControlMessage):
                self._handle_control(*json.loads(received.text))
            else:
                self._done += self.scatter.participants.batch_count if self._new is None else self._new
                self._steps += 1
        except PeerFailedError as error:
            self._ends_after = 0 if error is self.scatter.end_error else self._steps
            raise
        return received

    def _handle_control(self, kind: str, *values: Any) -> None:
        if kind == ControlKind.BEGIN:
            self.start = EpochStart(*values)
            self._done = self.start.skipped
        elif kind == ControlKind.TAIL:
            (self._new,) = values
        elif kind == ControlKind.END:
            self._ends_after = self._steps
        elif kind == ControlKind.STOPPED:
            rank, self._ends_after = values
            raise early_exit_error(rank)


class EarlyExits:
    """The early exits from the iterations of one loader.

    Args:
        store: the job's store.
        name: of the loader, the same on all ranks.
        rank: this rank.
    """

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store = JobStore(store, "tundish-dispatch")
        self._name = name
        self._rank = rank
        self._lock = threading.Lock()

    def report(self, iteration: int, steps: int) -> None:
        """Report that this rank left an iteration after so many steps. Errors name the first rank that left."""
        # In a thread, because a store whose host is stopped does not answer.
        with contextlib.suppress(RuntimeError):
            thread = DaemonThread("tundish-early-exit")
            wait([thread.submit(lambda: self._write(iteration, steps))], _REPORT_SECONDS)

    def find(self, iteration: int) -> tuple[int, int] | None:
        """The rank that left an iteration and its number of steps; None if none is known to have left."""
        found = None
        # Without the store the job ends, and other errors say so.
        with contextlib.suppress(Exception), self._lock:
            self._store.connect()
            found = self._store.read(self._key(iteration))
        if found is None:
            return None
        rank, steps = map(int, found.split())
        return rank, steps

    def forget(self, iteration: int) -> None:
        """Delete the key of an iteration."""
        with contextlib.suppress(Exception), self._lock:
            self._store.connect()
            self._store.delete(self._key(iteration))

    def _write(self, iteration: int, steps: int) -> None:
        with contextlib.suppress(Exception), self._lock:
            self._store.connect()
            self._store.write_once(self._key(iteration), f"{self._rank} {steps}")

    def _key(self, iteration: int) -> str:
        return f"{self._name}/{iteration}"


def early_exit_error(rank: int) -> PeerLeftLoopError:
    """The error of a rank that goes on where another one left the loop."""
    return PeerLeftLoopError(
        f"rank {rank} left the loop over the loader before its end, and this rank goes on: leave the loop on all ranks "
        "in the same step",
        rank,
    )
