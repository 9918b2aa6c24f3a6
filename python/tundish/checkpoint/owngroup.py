"""Gloo groups of a checkpointer's own, made when they are needed, which can be broken off in the middle.

Every rank of a group has a connection to every other one, which of thousands of ranks takes seconds to make and as many
descriptors: who saves nothing that needs the group, has none. What always holds: a rank that gives up in the middle of
a collective breaks the group off, so that the ranks that wait for it fail at once; the callers of the next save make
a new one, as those of the first did, all together, under a name that a vote gave them, so that a rank which was
interrupted meets the others again. Sockets close with the last reference to a group: nobody keeps one, nor what was
started in it, beyond the collective.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import distributed

from tundish.distributed.groups import named_group
from tundish.errors import PeerFailedError

__all__ = ["OwnGroup", "came_from_others"]


class OwnGroup:
    """A gloo group of `ranks` that nothing else uses: none until `renew`; closed by each rank for itself.

    `timeout`: seconds that a collective waits for the other ranks. `generation`: how often it was made.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: float) -> None:
        self._ranks = ranks
        self._timeout = timeout
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

    def renew(self, name: str) -> None:
        """Collective: make a new group in place of the one that is there, or was. `name`: never used before.

        To be called in `to_its_end`: the others wait for this rank until it is made. Raises `PeerFailedError` where
        another rank let go of it, or died, while this one was still connecting.
        """
        self.break_off()
        try:
            self._group = self._resources.enter_context(named_group(name, self._timeout, self._ranks))
        except Exception as error:
            if not came_from_others(error):
                raise
            problem = PeerFailedError(f"the ranks could not connect with one another: {error}", -1)
        else:
            self.generation += 1
            return
        raise problem

    def break_off(self, generation: int | None = None) -> None:
        """Let go of the group, or of that generation; whoever waits in it for this rank fails at once."""
        if generation in (None, self.generation):
            self._group = None
            self._resources.close()


def came_from_others(error: BaseException) -> bool:
    """Whether that is how torch and gloo tell that another rank is gone, or does not answer."""
    return type(error) is RuntimeError or isinstance(error, distributed.DistError)
