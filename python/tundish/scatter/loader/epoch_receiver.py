"""One iteration over an epoch on a receiver: it receives what an `EpochSource` sends."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from tundish.errors import PeerFailedError
from tundish.scatter.loader.early_exit import EarlyExits
from tundish.scatter.loader.epoch_source import EpochStart, NoteKind, Step, as_it_is, stopped
from tundish.scatter.received_batch import ReceivedBatch
from tundish.scatter.receiver import Note, ScatterReceiver

__all__ = ["EpochReceiver"]

# After so many errors in a row a receiver whose caller left reads no further.
_MAX_ERRORS = 8


class EpochReceiver:
    """An `Epoch` on a receiver; see there.

    Args:
        session: receives the batches.
        exits: the early exits of this loader.
        iteration: the number of the iteration.
        device: where the batches go.
    """

    def __init__(
        self, session: ScatterReceiver, exits: EarlyExits, iteration: int, device: torch.device | None
    ) -> None:
        self.start: EpochStart | None = None
        self.reading_seconds = 0.0
        self.last_heard = time.monotonic()
        self._session = session
        self._exits = exits
        self._iteration = iteration
        self._device = device
        self._done = 0
        # Of the batches of the last step, those that are new.
        self._new: int | None = None
        self._steps = 0
        # After how many steps the loop ends; None as long as it goes on.
        self._ends_after: int | None = None

    def next_step(self) -> Step | None:
        received = self._receive()
        while isinstance(received, Note):
            if self._ends_after is not None:
                return None
            received = self._receive()
        if received is None:
            return Step(None, False, self._done, None, 0)
        participants = self._session.participants
        is_padding = self._new is not None and participants.batch(participants.rank) >= self._new
        return Step(self._made(received), is_padding, self._done, None, received.schema.layout.total)

    def finish(self) -> None:
        pass

    def report_exit(self, steps: int, /) -> None:
        if self._ends_after is None or steps < self._ends_after:
            self._exits.report(self._iteration, steps)

    def leave(self, _: int, /) -> None:
        errors = 0
        while self._ends_after is None and errors < _MAX_ERRORS:
            # A type that is not known here, for example, or no memory for a batch.
            try:
                self._receive()
                errors = 0
            except Exception:  # noqa: BLE001 (the caller has left)
                errors += 1

    def steps_before(self, error: BaseException) -> int | None:
        return 0 if error is self._session.lost else self._ends_after

    def check_peers(self) -> None:
        pass

    def _receive(self) -> ReceivedBatch | Note | None:
        """The next message. A note is acted on."""
        try:
            received = self._session.receive()
            self.last_heard = time.monotonic()
            if isinstance(received, Note):
                self._act_on(*json.loads(received.text))
            else:
                self._done += self._session.participants.batches if self._new is None else self._new
                self._steps += 1
        except PeerFailedError as error:
            self._ends_after = 0 if error is self._session.lost else self._steps
            raise
        return received

    def _made(self, received: ReceivedBatch) -> Callable[[], Any]:
        """What makes the batch on the caller's thread; as much as can be is done before."""
        if self._device is None:
            return functools.partial(as_it_is, received.build(None))
        # On the caller's stream, so that its work on the batch comes after the copy.
        return functools.partial(received.pinned(self._device).build, self._device)

    def _act_on(self, kind: str, *values: Any) -> None:
        if kind == NoteKind.BEGIN:
            self.start = EpochStart(*values)
            self._done = self.start.done
        elif kind == NoteKind.TAIL:
            (self._new,) = values
        elif kind == NoteKind.END:
            self._ends_after = self._steps
        elif kind == NoteKind.STOPPED:
            rank, self._ends_after = values
            raise stopped(rank)
