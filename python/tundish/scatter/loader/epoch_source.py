"""One iteration over an epoch on the source: it reads batches and sends them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import torch

from tundish.progress import ProgressLine
from tundish.scatter.loader.batch_reader import BatchReader, StepBatches, Tail, step_count
from tundish.scatter.loader.early_exit import EarlyExits
from tundish.scatter.loader.epoch import ControlKind, Epoch, EpochStart, LoaderStep, early_exit_error
from tundish.scatter.loader.wrapped_loader import length_of
from tundish.scatter.source import ScatterSource
from tundish.tree import flatten_with_addresses

__all__ = ["EpochSource"]

# How often a source that skips batches tells the receivers that it is alive.
_ALIVE_SECONDS = 1.0


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
