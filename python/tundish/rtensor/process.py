"""What a process has once: where it serves, whom it trusts with the token, the backend that it uses.

What always holds: a child made by `fork` begins with nothing of its parent's: it serves nowhere, and is in no step.
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tundish.rtensor.undrained import Watch

if TYPE_CHECKING:
    from tundish.rtensor.backends import Backend
    from tundish.rtensor.serving import Server

__all__ = ["State", "state"]


@dataclass
class State:
    """Of one process.

    Attributes:
        claimant: what its claims on shards are known by.
        keeper: and what it keeps, which is not given up as claims are.
        epoch: the number of the last step of this process alone.
        in_step: whether one is under way.
        kept: the shards of others of which something was fetched and is not to end with a step, as far as is known.
        kept_entries: what was fetched of them: of one shard several parts, where rows were chosen.
        tokens: what is shown to others, by their addresses.
        watch: looks whether what is fetched is ever drained.
    """

    pid: int = field(default_factory=os.getpid)
    lock: threading.RLock = field(default_factory=threading.RLock)
    claimant: int = field(default_factory=lambda: secrets.randbits(63))
    keeper: int = field(default_factory=lambda: secrets.randbits(63))
    backend: Backend | None = None
    server: Server | None = None
    epoch: int = 0
    in_step: bool = False
    kept: set[str] = field(default_factory=set)
    kept_entries: int = 0
    tokens: dict[str, str] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)


_state = State()


def state() -> State:
    """That of this process."""
    global _state
    if _state.pid != os.getpid():
        _state = State()
    return _state
