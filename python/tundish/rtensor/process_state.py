"""The state of rtensor in one process: its server, its backend, its step, and its trust in servers.

Invariants:
    A child made by `fork` starts with a new state: it serves nothing, is in no step, and has no tokens.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["ProcessState", "Trust", "next_step_number", "state"]


class Trust(NamedTuple):
    """How this process speaks to a server.

    Attributes:
        token: the token to send, or None.
        certificates: the certificates to trust (PEM); None speaks no TLS.
    """

    token: str | None = None
    certificates: bytes | None = None


@dataclass
class ProcessState:
    """The state of one process.

    Attributes:
        backend: the `Backend` of this process, if one was set or used.
        server: its `Server`, if it serves.
        claimant: identifies the claims of this process's own steps.
        last_step: the number of the last step that began here or on a controller here.
        in_step: whether a step of this process alone is under way.
        kept: ids of other processes' shards that this process keeps beyond the end of a step.
        trusted: the token to send and the certificates to trust, by address.
        step_check_due: when to check whether any step ever began (`time.monotonic`); None before the first fetch.
    """

    pid: int = field(default_factory=os.getpid)
    lock: threading.RLock = field(default_factory=threading.RLock)
    claimant: int = field(default_factory=lambda: secrets.randbits(63))
    # Their modules import this one.
    backend: Any = None
    server: Any = None
    last_step: int = 0
    in_step: bool = False
    kept: set[str] = field(default_factory=set)
    trusted: dict[str, Trust] = field(default_factory=dict)
    step_check_due: float | None = None


_state = ProcessState()


def state() -> ProcessState:
    """The state of this process."""
    global _state
    if _state.pid != os.getpid():
        _state = ProcessState()
    return _state


def next_step_number() -> int:
    """The number of a new step: the time in microseconds, so that steps of several controllers differ and grow."""
    mine = state()
    with mine.lock:
        mine.last_step = max(mine.last_step + 1, time.time_ns() // 1000)
        return mine.last_step
