"""Where a rank stands in the data, and the state that says so.

What always holds: batches are counted as the source's loader gives them, so that a state holds for any number of ranks;
a state is taken over whole or refused whole.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from tundish.errors import InvalidInputError, InvalidTypeError, StateMismatchError

__all__ = ["Standing", "as_count"]

_KIND, _VERSION = "DispatchLoader", 1
_COUNTED = ("epoch", "batches")


class Standing:
    """`skip`: how many batches the first pass leaves out.

    Attributes:
        epoch: the one that the pass under way or the next one goes through.
        done: how many of its batches were handed out, or left out.
        loader_state: the source's loader's own state, after them; None elsewhere and where it has none.
        told_epoch: what `set_epoch` was called with last; None where it never was.
        loaded: epoch and batches of a state that was loaded, until a round after it was handed out.
    """

    def __init__(self, skip: int) -> None:
        self.epoch = 0
        self.done = skip
        self.loader_state: Any = None
        self.told_epoch: int | None = None
        self.loaded: tuple[int, int] | None = None
        self._skip = skip
        # Whether all rounds of the epoch were handed out, which nobody may ask for.
        self._is_through = False

    def begin(self) -> tuple[int, Any]:
        """A pass begins: how many batches are left out, and the state of the loader that stands for them."""
        if self._is_through:
            self.end()
        skip, state = self._skip, None
        if self.loaded is not None:
            skip, state = self.done, self.loader_state
        self.done, self.loader_state = skip, state
        return skip, state

    def go_on(self, done: int, state: Any, *, is_last: bool) -> None:
        """A round was handed out; `is_last`: as far as is known, of its epoch."""
        self.done, self.loader_state, self._is_through = done, state, is_last
        self._skip, self.loaded = 0, None

    def end(self) -> None:
        """The epoch is through."""
        self._skip = 0
        self._move(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        self.told_epoch, self._is_through = epoch, False
        if epoch != self.epoch:
            self._move(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": _KIND,
            "version": _VERSION,
            "epoch": self.epoch,
            "batches": self.done,
            "told_epoch": self.told_epoch,
            "loader": self.loader_state,
        }

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, Mapping) or state.get("kind") != _KIND:
            what = repr(state.get("kind")) if isinstance(state, Mapping) else type(state).__name__
            raise StateMismatchError(f"this is no state of a DispatchLoader: {what}")
        version = state.get("version")
        # True is one, too.
        if isinstance(version, bool) or version != _VERSION:
            raise StateMismatchError(
                f"the state has version {version!r}, this release of tundish reads {_VERSION}: "
                "load it with the release that saved it"
            )
        missing = [name for name in (*_COUNTED, "told_epoch", "loader") if name not in state]
        if missing:
            raise StateMismatchError(f"the loader's state lacks {', '.join(missing)}: it was cut or edited")
        try:
            epoch, batches = (as_count(state[name], name) for name in _COUNTED)
            told = None if state["told_epoch"] is None else as_count(state["told_epoch"], "told_epoch")
        except (InvalidInputError, InvalidTypeError) as error:
            raise StateMismatchError(f"the loader's state was edited: {error}") from None
        self.epoch, self.done, self.told_epoch = epoch, batches, told
        self.loader_state = state["loader"]
        self.loaded = epoch, batches
        self._skip, self._is_through = 0, False

    def _move(self, epoch: int) -> None:
        self.epoch, self.done, self.loader_state, self.loaded = epoch, self._skip, None, None
        self._is_through = False


def as_count(value: Any, name: str) -> int:
    """A whole number from 0 on. Raises `InvalidTypeError` and `InvalidInputError` for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(f"{name} is {value!r}: give a whole number") from None
    if not 0 <= number < 2**63:
        raise InvalidInputError(f"{name} is {number}: give a whole number from 0 on")
    return number
