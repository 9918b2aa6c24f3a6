"""Gloo groups of a checkpointer's own, made when they are needed, which can be broken off in the middle.

Every rank of a group has a connection to every other one, which of thousands of ranks takes seconds to make and as many
descriptors: who saves nothing that needs the group, has none. What always holds: a rank that gives up in the middle of
a collective breaks the group off, so that the ranks that wait for it fail at once; the callers of the next save make
a new one, as those of the first did, all together, under a name that a vote gave them, so that a rank which was
interrupted meets the others again; nobody waits in the making for a rank that died or could not begin it, of which gloo
would not hear before the timeout, nor for one that does not answer until after it, and it is made on all ranks or none.
Sockets close with the last reference to a group: nobody keeps one, nor what was started in it, beyond the collective.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from torch import distributed

from tundish.distributed import (
    RankFailure,
    Voter,
    second_client,
    store_load_factor,
    temporary_group,
)
from tundish.errors import PeerFailedError
from tundish.waiting import Moment, Thread, wait_for

# How often whoever makes a group looks whether all are still there; longer where many ask the store.
_LOOK_SECONDS = 0.25
# How long a rank that is interrupted goes on connecting: the others, if they come at all, are about to.
_HURRIED_SECONDS = 2.0
# How long a rank that gave up waits for what the others say of it, who hear of that when they look next.
_PARTING_SECONDS = 3.0

__all__ = ["Hurry", "PrivateGroup", "came_from_others"]

_WHAT = "connecting the ranks with one another"


class Hurry:
    """Whether the caller, whom something interrupted, has waited long enough for a group."""

    def __init__(self) -> None:
        self._until: float | None = None

    def begin(self) -> None:
        """Something interrupted the caller, perhaps not for the first time."""
        if self._until is None:
            self._until = time.monotonic() + _HURRIED_SECONDS

    def is_over(self) -> bool:
        """Whether nobody is to be waited for any more."""
        return self._until is not None and time.monotonic() > self._until


class PrivateGroup:
    """A gloo group of `ranks` that nothing else uses: none until `renew`; closed by each rank for itself.

    `timeout`: seconds that a collective waits for the other ranks. `voter`: of the threads that make it, by which they
    hear of one that does not come. `generation`: how often it was made.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: float, voter: Voter) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._voter = voter
        # Of what follows: a thread in the background may break off the group that the callers' thread replaces.
        # Re-entrant for a signal's handler.
        self._lock = threading.RLock()
        self._made: _Making | None = None
        self.generation = 0

    @property
    def is_absent(self) -> bool:
        """Whether there is no group on this rank: it was never made, or broken off."""
        made = self._made
        return made is None or made.is_nothing

    @property
    def group(self) -> Any:
        """The `ProcessGroup`; raises `PeerFailedError` where there is none: this rank broke it off."""
        made = self._made
        group = None if made is None else made.group
        if group is None:
            # Not None, which torch takes for the default group.
            raise PeerFailedError("the ranks' exchange broke off, since one of them gave up", -1)
        return group

    def of_generation(self, generation: int) -> Any:
        """`group`; raises `PeerFailedError`, too, where it was made anew since."""
        group = self.group
        if generation != self.generation:
            raise PeerFailedError("the ranks' exchange broke off, since one of them gave up", -1)
        return group

    def renew(self, name: str, hurry: Hurry | None = None) -> None:
        """Collective: make a new group in place of the one that is there, or was. `name`: never used before.

        To be called in `to_its_end`: the others wait for this rank until it is made. `hurry`: ends that for
        all where this rank is interrupted and another one does not come. Raises, on all ranks or none, what this rank
        could not make it with; `PeerFailedError` where another one let go of it, died, or could not make it; and
        `VoteTimeoutError` where one did not come.
        """
        self.break_off()
        hurry = Hurry() if hurry is None else hurry
        making = _Making(name, self._timeout, self._ranks)
        try:
            making.wait(self._voter, hurry)
            self._agree(making, hurry)
        except BaseException:
            making.give_up()
            raise
        with self._lock:
            self._made = making
            self.generation += 1

    def _agree(self, making: _Making, hurry: Hurry) -> None:
        """Collective: raise on all ranks where one has no group, with what it came to nothing with on any.

        Twice where there is none: a rank that could not connect, as another one was gone, may not be taken for the one
        that failed; so the first vote is for those that are to blame, and names who does not come to it.
        """
        parting = _PARTING_SECONDS * store_load_factor(len(self._ranks))
        left = parting if making.is_nothing else parting + making.seconds_left
        with self._voter.extra_failure_source(lambda: self._interruption(hurry)):
            is_nothing = self._voter.vote(making.fault, what=_WHAT, flag=making.is_nothing, timeout=left)
        if is_nothing:
            self._voter.vote(making.consequence, what=_WHAT, timeout=parting)
            raise PeerFailedError(f"{_WHAT}: one of them is gone", -1)

    def _interruption(self, hurry: Hurry) -> RankFailure | None:
        if not hurry.is_over():
            return None
        return RankFailure(rank=self._voter.rank, text="was interrupted while it waited for the others")

    def break_off(self, generation: int | None = None) -> None:
        """Let go of the group, or of that generation; whoever waits in it for this rank fails at once."""
        with self._lock:
            if generation in (None, self.generation) and self._made is not None:
                # In this order: where Ctrl-C interrupts it, it is done once more.
                self._made.give_up()
                self._made = None


class _Making:
    """A group that is made on a thread of its own, which is left behind where it is known that it comes to nothing.

    `is_nothing`: whether there is no group. `fault`: what this rank could not make it with. `consequence`: how it heard
    that another one kept it from that, where it is the one to tell.
    """

    def __init__(self, name: str, timeout: float, ranks: tuple[int, ...]) -> None:
        self.group: Any = None
        self.fault: BaseException | None = None
        self.consequence: BaseException | None = None
        self._name = name
        self._timeout = timeout
        self._ranks = ranks
        self._until = time.monotonic() + timeout
        self._resources = contextlib.ExitStack()
        # Re-entrant for a signal's handler.
        self._lock = threading.RLock()
        self._over = Moment()
        self._is_given_up = False
        # A client of the store; kept while the group is used, whose own hold on it Python does not see.
        self._way: Any = None
        self._thread: threading.Thread = Thread(self._make, "tundish-connecting")
        try:
            self._thread.start()
        except RuntimeError:
            # No more threads.
            self._make()

    @property
    def is_nothing(self) -> bool:
        return self.group is None

    @property
    def seconds_left(self) -> float:
        """Of the time that the others are waited for."""
        return max(0.0, self._until - time.monotonic())

    def wait(self, voter: Voter, hurry: Hurry) -> None:
        """Until it is made, or came to nothing; `voter` tells what became of the others."""
        pause = _LOOK_SECONDS * store_load_factor(len(self._ranks))
        while not wait_for(self._over.wait, pause):
            if hurry.is_over():
                self._come_to_nothing_with("this one was interrupted while it waited for the others")
            elif not self.seconds_left:
                self._come_to_nothing_with(f"not all of them came within {self._timeout:.4g} s")
            elif not voter.next_vote_fails(pause):
                continue
            # With what it came to nothing otherwise, another one says.
            self.give_up()
            return

    def _come_to_nothing_with(self, why: object) -> None:
        self.consequence = PeerFailedError(f"the ranks could not connect with one another: {why}", -1)

    def give_up(self) -> None:
        """Nobody wants the group any more: close it, where it is or once it is made."""
        with self._lock:
            self._is_given_up = True
            self.group = None
            if self._over.has_come():
                self._resources.close()

    def _make(self) -> None:
        group: Any = None
        try:
            self._find_way()
            made = temporary_group(self._name, self._timeout, self._ranks, store=self._way)
            group = self._resources.enter_context(made)
        except BaseException as error:  # noqa: BLE001 (the others are told, and the caller raises it)
            if came_from_others(error):
                self._come_to_nothing_with(error)
            else:
                self.fault = error
        with self._lock:
            try:
                if self._is_given_up:
                    self._resources.close()
                else:
                    self.group = group
            finally:
                # Last: who waits for it looks at the group next, without the lock.
                self._over.come()

    def _find_way(self) -> None:
        """Take a client of the job's store. Raises where nobody wants the group any more."""
        if not distributed.is_initialized():
            # Whoever makes the group says so.
            return
        base = distributed.distributed_c10d._get_default_store()
        # Of its own: gloo, while it waits for a rank, holds up all other users of a client, the script's own groups
        # among them. On another rank it may be them that it waits for.
        self._way = second_client(base)
        with self._lock:
            if self._is_given_up:
                raise PeerFailedError("nobody wants the group any more", -1)


def came_from_others(error: BaseException) -> bool:
    """Whether that is how torch and gloo tell that another rank is gone, or does not answer."""
    return type(error) is RuntimeError or isinstance(error, distributed.DistError)
