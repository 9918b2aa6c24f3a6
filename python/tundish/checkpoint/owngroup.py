"""Gloo groups of a checkpointer's own, which can be left in the middle.

What always holds: a rank that gives up in the middle of a collective lets go of the group, so that the ranks that
wait for it fail at once; the callers of the next save make a new one, all together.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tundish.distributed import long_timeout_group

__all__ = ["OwnGroup"]


class OwnGroup:
    """A gloo group of `ranks` that nothing else uses. Collective to make; closed by each rank for itself.

    `group`: None while it is broken off. `timeout`: seconds that an exchange waits for the other ranks.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: float) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._resources = contextlib.ExitStack()
        self.group: Any = None
        self.renew()

    @property
    def is_broken(self) -> bool:
        """Whether this rank let go of the group."""
        return self.group is None

    def renew(self) -> None:
        """Collective: make a new group in place of the one that is there, or was."""
        self.close()
        self.group = self._resources.enter_context(long_timeout_group(self._timeout, self._ranks))

    def close(self) -> None:
        """Let go of the group; whoever waits in it for this rank fails at once."""
        self.group = None
        self._resources.close()
