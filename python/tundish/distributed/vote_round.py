"""One vote, as one rank has it.

What always holds: what its caller and the thread that goes through it both may set is decided under its lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tundish.distributed.tally import Tally
from tundish.distributed.verdict import RankFailure, Verdict
from tundish.waiting import Moment

__all__ = ["NOTE", "Round"]

# The status of a rank that is well and notes something.
NOTE = "noted"


@dataclass(kw_only=True)
class Round:
    """One vote of this rank.

    Its thread sets what has a value at first, its caller `abandoned`, `interruption` and `beside_store`.

    `what`: the step voted on. `warn_after`: seconds after which somebody says for whom it waits, doubled each time.
    `are_all_there`, `absent`: when this rank looked around last, whether all brought their status, and who will not,
    as `missed` told. `beside_store`: once it was decided there, or not, whether it went well.

    `lock` decides between a caller that gives up and a verdict that comes at that moment: the caller returns
    the verdict, or its thread sees `abandoned`.
    """

    number: int
    what: str
    own: RankFailure | None
    same: str | None
    brought: str | None
    told: str | None
    source: int | None
    note: bool
    missed: Callable[[], RankFailure | None] | None
    started: float
    deadline: float | None
    warn_after: float | None = None
    gathered: list[str] = field(default_factory=list)
    heard: str | None = None
    beside_store: list[bool] = field(default_factory=list)
    done: Moment = field(default_factory=Moment)
    lock: threading.Lock = field(default_factory=threading.Lock)
    posted: bool = False
    are_all_there: bool = False
    absent: RankFailure | None = None
    turn: float | None = None
    verdict: Verdict | None = None
    concluder: bool = False
    trouble: Exception | None = None
    abandoned: bool = False
    interruption: RankFailure | None = None

    @property
    def status(self) -> str:
        """What this rank brings."""
        if self.own is not None:
            return self.own.to_json()
        return NOTE if self.note else ""

    @property
    def went_well_beside_store(self) -> bool:
        """Whether it is over, and the store knows nothing of it."""
        return True in self.beside_store

    @property
    def counted(self) -> Tally:
        """What this rank adds to the counter of the round."""
        has_failed = self.own is not None
        return Tally(arrived=1, failed=int(has_failed), noted=int(self.note and not has_failed))
