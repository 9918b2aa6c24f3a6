"""Rounds of votes among ranks of one node, decided in memory that they share, as long as all goes well.

Owns a group's ballot box. What always holds: a round that went well here did so for all members, and the store knows
nothing of it; of every other one all members hear that it is to be decided there, where whoever failed, was killed or
did not come is found and named. So what takes the store a dozen requests of each rank takes microseconds, and what goes
wrong is told as if there were no box. A member that goes through a round in another way gives it up here: else the
others would wait for its ballot.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from tundish._native import BallotBox
from tundish.distributed.vote_round import Round
from tundish.errors import TundishError

__all__ = ["Ballots"]

# Whoever comes this much later finds the others at the store: beside such a wait what it takes is nothing.
_PATIENCE_SECONDS = 0.1
# Between two looks at signals.
_LOOK_SECONDS = 0.02
# More are not on one node.
_MOST_MEMBERS = 512
_NOTHING_TO_COMPARE = bytes(32)


class Ballots:
    """The box of the group of so many `members`, of which this is the one of number `me`."""

    def __init__(self, me: int, members: int) -> None:
        self._me = me
        self._members = members
        self._made: BallotBox | None = None
        self._box: BallotBox | None = None

    def offer(self) -> tuple[int, int, int] | None:
        """Make a box; where the others find it, None where there can be none."""
        if self._members > _MOST_MEMBERS:
            return None
        try:
            self._made = BallotBox(self._members)
        except (TundishError, OSError):
            return None
        return self._made.address

    def join(self, offered: Sequence[int] | None) -> None:
        """Use the box that one of the members offered; without it, or where it cannot be reached, nobody uses any."""
        try:
            if self._made is not None:
                self._box = self._made
            elif offered is not None:
                maker, descriptor, identity = offered
                self._box = BallotBox.open((maker, descriptor, identity), self._members)
        except (TundishError, OSError):
            return
        if self._box is not None:
            self._box.join(self._me)

    def let_go(self) -> None:
        """Use none: the members are not all on one node, or this one closes."""
        self._made = self._box = None

    def decide(self, current: Round, *, is_plain: bool, seconds: float | None) -> None:
        """Note in `current` whether it went well here; where it did not, it is to be decided in the store.

        `is_plain`: this rank brings nothing but that it is well, and what is to be the same on all ranks, and has
        nothing to delete in the store before. `seconds`: until its deadline.
        """
        box = self._box
        if box is None:
            return
        # In one step as far as Ctrl-C sees, whatever ended the wait: what the others hear, this rank has to know.
        told = map(box.give_up, (current.number,))
        try:
            if is_plain and box.are_all_there:
                decided = box.cast(self._me, current.number, _ballot_of(current.same))
                patience = _PATIENCE_SECONDS if seconds is None else min(seconds, _PATIENCE_SECONDS)
                until = time.monotonic() + patience
                while decided is None and (left := until - time.monotonic()) > 0:
                    decided = box.wait(current.number, min(_LOOK_SECONDS, left))
        finally:
            current.beside_store.extend(told)


def _ballot_of(same: str | None) -> bytes:
    if same is None:
        return _NOTHING_TO_COMPARE
    return hashlib.sha256(same.encode(errors="surrogatepass")).digest()
