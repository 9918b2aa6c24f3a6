"""The progress of a rank in the data, and the state to resume from.

Invariants:
- Batches are counted as the source's loader gives them, so a state holds for any number of ranks.
- A state is loaded whole or refused whole.
"""

from __future__ import annotations

import operator
from typing import Any

from tundish.errors import InvalidInputError, InvalidTypeError, StateMismatchError
from tundish.saved_states import check_state

_KIND, _VERSION = "DispatchLoader", 1
_COUNTED = ("epoch", "batches")


class LoaderState:
    """The progress of a `DispatchLoader` on one rank.

    Args:
        skip: how many batches the first iteration skips.

    Attributes:
        epoch: the epoch of the iteration under way, or of the next one.
        batches: how many batches of that epoch were handed out or skipped, over all ranks.
        loader_state: the state of the source's loader after them; None on other ranks and where it has none.
        requested_epoch: the last argument of `set_epoch`; None before its first call.
        loaded: epoch and batches of a state that was loaded, until a step after it is handed out.
    """

    def __init__(self, skip: int) -> None:
        self.epoch = 0
        self.batches = skip
        self.loader_state: Any = None
        self.requested_epoch: int | None = None
        self.loaded: tuple[int, int] | None = None
        self._skip = skip
        # Whether the last step of the epoch was handed out, though the end was not asked for.
        self._is_complete = False

    def begin(self) -> tuple[int, Any]:
        """Begin an iteration. Returns how many batches it skips, and the loader's state after them."""
        if self._is_complete:
            self.end()
        skip, state = self._skip, None
        if self.loaded is not None:
            skip, state = self.batches, self.loader_state
        self.batches, self.loader_state = skip, state
        return skip, state

    def advance(self, batches: int, state: Any, *, is_last: bool) -> None:
        """Count a step that was handed out. `is_last`: whether it is known to be the last of its epoch."""
        self.batches, self.loader_state, self._is_complete = batches, state, is_last
        self._skip, self.loaded = 0, None

    def end(self) -> None:
        """The epoch is complete."""
        self._skip = 0
        self._move_to(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`, unless that is the epoch under way."""
        self.requested_epoch, self._is_complete = epoch, False
        if epoch != self.epoch:
            self._move_to(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state, of plain values."""
        return {
            "kind": _KIND,
            "version": _VERSION,
            "epoch": self.epoch,
            "batches": self.batches,
            "requested_epoch": self.requested_epoch,
            "loader": self.loader_state,
        }

    def load_state_dict(self, state: Any) -> None:
        """Take over a state. Raises `StateMismatchError`, and changes nothing, where it is damaged."""
        check_state(state, _KIND, _VERSION, (*_COUNTED, "requested_epoch", "loader"))
        requested = state["requested_epoch"]
        try:
            epoch, batches = (as_count(state[name], name) for name in _COUNTED)
            if requested is not None:
                requested = as_count(requested, "requested_epoch")
        except (InvalidInputError, InvalidTypeError) as error:
            raise StateMismatchError(f"the loader's state was edited: {error}") from None
        self.epoch, self.batches, self.requested_epoch = epoch, batches, requested
        self.loader_state = state["loader"]
        self.loaded = epoch, batches
        self._skip, self._is_complete = 0, False

    def _move_to(self, epoch: int) -> None:
        self.epoch, self.batches, self.loader_state, self.loaded = epoch, self._skip, None, None
        self._is_complete = False


def as_count(value: Any, name: str) -> int:
    """A whole number of at least 0. Raises `InvalidTypeError` and `InvalidInputError` for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(f"{name} is {value!r}: give a whole number") from None
    if not 0 <= number < 2**63:
        raise InvalidInputError(f"{name} is {number}: give a whole number from 0 on")
    return number
