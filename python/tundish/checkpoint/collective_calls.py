"""The calls of a checkpointer that all ranks make together.

What always holds:

1. No thread makes one inside another, of which the other ranks could not know.
2. The votes of a call have numbers of its own, so that they meet though one rank, which lost sight of the rest, went
   through fewer before.
3. A rank that something keeps from a vote for which the others wait tells them of it, wherever in the call it comes:
   they would wait until the rank's next call, and from then on be one call ahead of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from tundish.distributed import Voter, store_load_factor
from tundish.errors import InvalidInputError

__all__ = ["CollectiveCalls"]

# More votes than a call holds, but for a loading that passes over dozens of damaged checkpoints.
_VOTES = 256
# How long a rank that was interrupted waits for the others to hear of it: they are told at once, if at all.
_TELLING_SECONDS = 10.0

T = TypeVar("T")


class _Inside(threading.local):
    """Of each thread: the call that it is inside, and whether the other ranks may still wait for it there."""

    call: str | None = None
    is_awaited: bool = False


class CollectiveCalls:
    """The collective calls of one rank. `voter`: of the threads that make them."""

    def __init__(self, voter: Voter) -> None:
        self._voter = voter
        self._inside = _Inside()

    def make(self, call: str, check: Callable[[str], None], work: Callable[[], T]) -> T:
        """Collective: what `work` returns. `check`: refuses the call, on this rank alone, where it must not be made.

        Raises `InvalidInputError` where the thread is inside a call already.
        """
        inside = self._inside
        outer = inside.call
        first: int | None = None
        try:
            if outer is not None:
                raise InvalidInputError(
                    f"{call}() was called inside {outer}(), by a signal's handler or a function that was given: the "
                    "other ranks cannot know of it. Have the handler take a note, and save between two steps"
                )
            inside.call, inside.is_awaited = call, True
            check(call)
            first = self._first_vote()
            return work()
        except BaseException as caught:
            is_refused = first is None and isinstance(caught, Exception)
            if outer is None and inside.is_awaited and not is_refused:
                # Whatever comes meanwhile, the caller hears of what came first.
                with contextlib.suppress(BaseException):
                    self._tell(call, caught, first)
            raise
        finally:
            inside.call = outer

    def leave(self) -> None:
        """From here on in this thread's call the other ranks hear of this one in another way, or not at all."""
        self._inside.is_awaited = False

    def _first_vote(self) -> int:
        """The number of the first vote of this call, which is the next one then."""
        # A call that was interrupted before it voted leaves its numbers to the next, which the others wait for.
        number = -(-self._voter.last_vote.number // _VOTES) * _VOTES
        self._voter.skip_to(number)
        return number

    def _tell(self, call: str, error: BaseException, first: int | None) -> None:
        """Tell the others of `error`, unless the last vote did."""
        voter = self._voter
        if first is None:
            first = self._first_vote()
        if voter.last_vote.number == first or voter.note_in_spite_of_interrupt() is not None:
            voter.vote(error, what=call, timeout=_TELLING_SECONDS * store_load_factor(len(voter.ranks)))
