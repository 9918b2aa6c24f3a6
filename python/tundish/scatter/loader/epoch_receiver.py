"""One iteration over an epoch on a receiver."""

from __future__ import annotations

import json
import time
from typing import Any

from tundish.errors import PeerFailedError
from tundish.scatter.incoming_batch import IncomingBatch
from tundish.scatter.loader.epoch import ControlKind, Epoch, EpochStart, LoaderStep, early_exit_error
from tundish.scatter.receiver import ControlMessage, ScatterReceiver

__all__ = ["EpochReceiver"]

# A receiver whose caller left stops reading after so many errors in a row.
_MAX_ERRORS = 8


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
