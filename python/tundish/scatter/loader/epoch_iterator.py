"""The iterator over one epoch that a `DispatchLoader` returns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

from tundish.errors import InvalidInputError
from tundish.scatter.loader.epoch import LoaderStep
from tundish.scatter.loader.prefetch import InlineSteps

__all__ = ["FORKED", "EpochIterator"]

FORKED = "this DispatchLoader was made before a fork: make one in the process that uses it"

T_co = TypeVar("T_co", covariant=True)


class EpochIterator(Iterator[T_co]):
    """Iterates over this rank's batches of one epoch. Deleting it leaves the loop.

    Args:
        steps: the steps of the iteration.
        hand_out: returns the batch of a step; called with None at the end. Its second argument is how many seconds the
            loop waited for the step.
    """

    def __init__(self, steps: InlineSteps, hand_out: Callable[[LoaderStep | None, float], T_co]) -> None:
        self._steps = steps
        self._hand_out = hand_out
        self._process = os.getpid()
        self._is_over = False
        self._left_because: str | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        self._raise_if_left()
        if self._is_over:
            raise StopIteration
        if os.getpid() != self._process:
            raise InvalidInputError(FORKED)
        begin = time.monotonic()
        try:
            try:
                step = self._steps.next_step()
            except Exception:
                self._raise_if_left()
                raise
            # A signal's handler may have left the loop meanwhile.
            self._raise_if_left()
            batch = self._hand_out(step, time.monotonic() - begin)
        except BaseException:
            self.close()
            raise
        if step is None:
            self._is_over = True
            raise StopIteration
        return batch

    def close(self, why: str | None = None) -> None:
        """Leave the loop, where it is not over. `why`: where it is not the caller that leaves it."""
        if not self._is_over and os.getpid() == self._process:
            self._left_because = why
            self._is_over = True
            self._steps.leave()

    def _raise_if_left(self) -> None:
        if self._left_because is not None:
            # The end of the iteration would look like the end of the data.
            raise InvalidInputError(f"this iterator has no more steps: {self._left_because}")

    def __del__(self) -> None:
        # At the end of the interpreter, modules may be gone.
        try:  # noqa: SIM105
            self.close()
        except Exception:  # noqa: BLE001, S110
            pass
