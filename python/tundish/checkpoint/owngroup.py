"""Gloo groups of a checkpointer's own, which can be left in the middle.

What always holds: a rank that gives up in the middle of a collective lets go of the group, so that the ranks that
wait for it fail at once; the callers of the next save make a new one, all together. Sockets close with the last
reference to a group: nobody keeps one, nor what was started in it, beyond the collective.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tundish.distributed import long_timeout_group
from tundish.errors import PeerFailedError

__all__ = ["OwnGroup"]


class OwnGroup:
    """A gloo group of `ranks` that nothing else uses. Collective to make; closed by each rank for itself.

    `timeout`: seconds that a collective waits for the other ranks. `generation`: how often it was made.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: float) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._resources = contextlib.ExitStack()
        self._group: Any = None
        self.generation = 0
        self.renew()

    @property
    def is_broken(self) -> bool:
        """Whether this rank let go of the group."""
        return self._group is None

    @property
    def group(self) -> Any:
        """The `ProcessGroup`; raises `PeerFailedError` where this rank let go of it."""
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

    def renew(self) -> None:
        """Collective: make a new group in place of the one that is there, or was."""
        self.close()
        self._group = self._resources.enter_context(long_timeout_group(self._timeout, self._ranks))
        self.generation += 1

    def close(self, generation: int | None = None) -> None:
        """Let go of the group, or of that generation; whoever waits in it for this rank fails at once."""
        if generation in (None, self.generation):
            self._group = None
            self._resources.close()
