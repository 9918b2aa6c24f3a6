"""The iterator over one epoch that a `DispatchLoader` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from tundish.errors import InvalidInputError
from tundish.scatter.loader.prefetch import Steps

__all__ = ["FORKED", "EpochIterator"]

FORKED = "this DispatchLoader was made before a fork: make one in the process that uses it"

T_co = TypeVar("T_co", covariant=True)


class EpochIterator(Iterator[T_co]):
    """Iterates over this rank's batches of one epoch. Dropping it leaves the loop.

    Args:
        take: returns the batch of the next step in a tuple, None at the end. It is called with a function that raises
            where the loop was left meanwhile, by a signal's handler for example.
        steps: the steps of the iteration.
    """

    def __init__(self, take: Callable[[Callable[[], None]], tuple[Any] | None], steps: Steps) -> None:
        self._take = take
        self._steps = steps
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
        try:
            taken = self._take(self._raise_if_left)
        except StopIteration as error:
            self.close()
            # A loop would take it for the end of the data.
            raise RuntimeError(
                "StopIteration was raised where a batch is taken apart or put together: by a next() without a default?"
            ) from error
        except BaseException:
            self.close()
            raise
        if taken is not None:
            return taken[0]  # type: ignore[no-any-return]
        self._is_over = True
        raise StopIteration

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
