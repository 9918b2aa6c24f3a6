"""Gloo groups of a checkpointer's own, which can be broken off in the middle.

What always holds: a rank that gives up in the middle of a collective breaks the group off, so that the ranks that wait
for it fail at once; the callers of the next save make a new one, all together, under a name that a vote gave them, so
that a rank which was interrupted meets the others again. Sockets close with the last reference to a group: nobody keeps
one, nor what was started in it, beyond the collective.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tundish.distributed.groups import named_group
from tundish.errors import PeerFailedError
from tundish.waiting import to_its_end

__all__ = ["OwnGroup"]


class OwnGroup:
    """A gloo group of `ranks` that nothing else uses. Collective to make; closed by each rank for itself.

    `timeout`: seconds that a collective waits for the other ranks. `name`: never used before. `generation`: how often
    it was made.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: float, name: str) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._resources = contextlib.ExitStack()
        self._group: Any = None
        self.generation = 0
        to_its_end(lambda: self.renew(name))

    @property
    def is_broken(self) -> bool:
        """Whether this rank broke the group off."""
        return self._group is None

    @property
    def group(self) -> Any:
        """The `ProcessGroup`; raises `PeerFailedError` where this rank broke it off."""
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

    def renew(self, name: str) -> None:
        """Collective: make a new group in place of the one that is there, or was.

        To be called in `to_its_end`: the others wait for this rank until it is made.
        """
        self.break_off()
        self._group = self._resources.enter_context(named_group(name, self._timeout, self._ranks))
        self.generation += 1

    def break_off(self, generation: int | None = None) -> None:
        """Let go of the group, or of that generation; whoever waits in it for this rank fails at once."""
        if generation in (None, self.generation):
            self._group = None
            self._resources.close()
