"""One pass through a `DispatchLoader`, as its caller sees it: an iterator.

What always holds: who lets go of it leaves the pass; once the pass was left for another reason it says so, and does not
look like the end of the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from tundish.errors import InvalidInputError
from tundish.scatter.loader.prefetch import Rounds

__all__ = ["FORKED", "EpochIterator"]

FORKED = "this DispatchLoader was made before a fork: make one in the process that uses it"

T_co = TypeVar("T_co", covariant=True)


class EpochIterator(Iterator[T_co]):
    """The batches of `rounds`.

    `take`: the batch of the next round, None at the end; called with what raises where the pass was left meanwhile.
    """

    def __init__(self, take: Callable[[Callable[[], None]], tuple[Any] | None], rounds: Rounds) -> None:
        self._take = take
        self._rounds = rounds
        self._process = os.getpid()
        self._is_over = False
        self._left_since: str | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        self._check()
        if self._is_over:
            raise StopIteration
        if os.getpid() != self._process:
            raise InvalidInputError(FORKED)
        try:
            taken = self._take(self._check)
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
        """Leave the pass, where it is not over. `why`: if it is not its caller who leaves it."""
        if not self._is_over and os.getpid() == self._process:
            self._left_since = why
            self._rounds.leave()
            self._is_over = True

    def _check(self) -> None:
        if self._left_since is not None:
            # There may be more, which would be missed without a word.
            raise InvalidInputError(f"this iterator has no more rounds: {self._left_since}")

    def __del__(self) -> None:
        # When the interpreter ends, what this module has imported may be gone before.
        try:  # noqa: SIM105
            self.close()
        except Exception:  # noqa: BLE001, S110
            pass
