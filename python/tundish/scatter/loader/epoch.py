"""One iteration over an epoch: the base class of its source and its receivers.

To each receiver an iteration is a control message that it begins, steps, and one message that ends it: a control
message or an error. The receivers read all of them, also after their callers left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from tundish.errors import PeerLeftLoopError
from tundish.scatter.loader.early_exit import EarlyExits
from tundish.scatter.scatter_rank import ScatterRank

__all__ = ["ControlKind", "Epoch", "EpochStart", "LoaderStep", "early_exit_error"]


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
        """How many steps the caller may still get, in all, before this error; None for all that are there."""
        return 0 if error is self.scatter.end_error else self._ends_after


def early_exit_error(rank: int) -> PeerLeftLoopError:
    """The error of a rank that goes on where another one left the loop."""
    return PeerLeftLoopError(
        f"rank {rank} left the loop over the loader before its end, and this rank goes on: leave the loop on all ranks "
        "in the same step",
        rank,
    )
