"""Gloo groups of a checkpointer's own, made when they are needed, which can be broken off in the middle.

Every rank of a group has a connection to every other one, which of thousands of ranks takes seconds to make and as many
descriptors: who saves nothing that needs the group, has none. What always holds: a rank that gives up in the middle of
a collective breaks the group off, so that the ranks that wait for it fail at once; the callers of the next save make
a new one, as those of the first did, all together, under a name that a vote gave them, so that a rank which was
interrupted meets the others again; nobody waits in the making for a rank that died or could not begin it, of which gloo
would not hear before the timeout. Sockets close with the last reference to a group: nobody keeps one, nor what was
started in it, beyond the collective.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from torch import distributed

from tundish.distributed import Voter
from tundish.distributed.groups import named_group
from tundish.distributed.jobstore import second_client
from tundish.distributed.rounds import crowd_of
from tundish.distributed.verdict import Failure
from tundish.errors import PeerFailedError
from tundish.waiting import Moment, Thread, wait_for

# How often whoever makes a group looks whether all are still there; longer where many ask the store.
_LOOK_SECONDS = 0.25
# How long a rank that is interrupted goes on connecting: the others, if they come at all, are about to.
_HURRIED_SECONDS = 2.0

__all__ = ["Hurry", "OwnGroup", "came_from_others"]


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


class OwnGroup:
    """A gloo group of `ranks` that nothing else uses: none until `renew`; closed by each rank for itself.

    `timeout`: seconds that a collective waits for the other ranks. `voter`: of the threads that make it, by which they
    hear of one that does not come. `generation`: how often it was made.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: float, voter: Voter) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._voter = voter
        self._resources = contextlib.ExitStack()
        self._group: Any = None
        self.generation = 0

    @property
    def is_absent(self) -> bool:
        """Whether there is no group on this rank: it was never made, or broken off."""
        return self._group is None

    @property
    def group(self) -> Any:
        """The `ProcessGroup`; raises `PeerFailedError` where there is none: this rank broke it off."""
        if self._group is None:
            # Not None, which torch takes for the default group.
            raise PeerFailedError("the ranks' exchange broke off, since one of them gave up", -1)
        return self._group

    def of_generation(self, generation: int) -> Any:
        """`group`; raises `PeerFailedError`, too, where it was made anew since."""
        group = self.group
        if generation != self.generation:
            raise PeerFailedError("the ranks' exchange broke off, since one of them gave up", -1)
        return group

    def renew(self, name: str, hurry: Hurry | None = None) -> None:
        """Collective: make a new group in place of the one that is there, or was. `name`: never used before.

        To be called in `to_its_end`: the others wait for this rank until it is made. `hurry`: ends that for
        all where this rank is interrupted and another one does not come. Raises `PeerFailedError`, on all ranks or
        none, where another rank let go of it, died, or could not make it.
        """
        self.break_off()
        hurry = Hurry() if hurry is None else hurry
        making = _Making(name, self._timeout, self._ranks, self._voter, hurry)
        what = "connecting the ranks with one another"
        try:
            with self._voter.heeding(lambda: self._interruption(hurry)):
                self._voter.vote(making.problem, what=what, timeout=self._timeout)
            if making.is_given_up:
                # The vote was over before what this rank gave up for came to pass.
                raise PeerFailedError(f"{what}: one of them is gone", -1)
        except BaseException:
            making.give_up()
            raise
        self._group, self._resources = making.group, making.resources
        self.generation += 1

    def _interruption(self, hurry: Hurry) -> Failure | None:
        if not hurry.is_over():
            return None
        return Failure(rank=self._voter.rank, text="was interrupted while it waited for the others")

    def break_off(self, generation: int | None = None) -> None:
        """Let go of the group, or of that generation; whoever waits in it for this rank fails at once."""
        if generation in (None, self.generation):
            self._group = None
            self._resources.close()


class _Making:
    """A group that is made on a thread of its own, which is left behind where it is known that it comes to nothing.

    `problem`: what it came to nothing with, as far as this rank knows by itself. `is_given_up`: whether nobody wants it
    any more. `resources`: closes the group.
    """

    def __init__(self, name: str, timeout: float, ranks: tuple[int, ...], voter: Voter, hurry: Hurry) -> None:
        self.group: Any = None
        self.problem: BaseException | None = None
        self.resources = contextlib.ExitStack()
        self._lock = threading.Lock()
        self.is_given_up = False
        self._over = Moment()

        def run() -> None:
            self._make(name, timeout, ranks)

        try:
            Thread(run, "tundish-connecting").start()
        except RuntimeError:
            # No more threads.
            run()
        pause = _LOOK_SECONDS * crowd_of(len(ranks))
        while not wait_for(self._over.wait, pause):
            if hurry.is_over() or voter.is_next_lost():
                self.give_up()
                break

    def give_up(self) -> None:
        """Nobody wants the group any more."""
        with self._lock:
            self.is_given_up = True
            if self._over.has_come():
                self.resources.close()
            else:
                _left_behind.add(self)
        self.group = None

    def _make(self, name: str, timeout: float, ranks: tuple[int, ...]) -> None:
        store = None
        try:
            if _left_behind:
                # It holds up the default group's way to the store.
                store = second_client(distributed.distributed_c10d._get_default_store())
            self.group = self.resources.enter_context(named_group(name, timeout, ranks, store=store))
        except BaseException as error:  # noqa: BLE001 (the others are told, and the caller raises it)
            self.problem = error
            if came_from_others(error):
                self.problem = PeerFailedError(f"the ranks could not connect with one another: {error}", -1)
        with self._lock:
            self._over.come()
            _left_behind.discard(self)
            if self.is_given_up:
                self.group = None
                self.resources.close()


# Until gloo gives up.
_left_behind: set[_Making] = set()


def came_from_others(error: BaseException) -> bool:
    """Whether that is how torch and gloo tell that another rank is gone, or does not answer."""
    return type(error) is RuntimeError or isinstance(error, distributed.DistError)
