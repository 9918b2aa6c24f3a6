"""Calls that were refused for their group: nobody knows with whom they were made, and those wait for this rank.

Told through the job's store. What always holds:

1. Ranks that were refused differently often open no scatter together: one may be behind the other by as many rounds. So
   whoever waits for a rank that was refused oftener waits in vain, and nobody else is told of it.
2. A rank that is in no group where the others are in one has a number of torch's in its place: that call was nobody's
   round. It is told of only where the program ends by it, as then that rank will not come.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from tundish.distributed import JobStore, RankFailure, Voter, group_info, torch_distributed
from tundish.scatter.telling import tell_aside, wait_for_telling

__all__ = ["heeding", "is_no_members", "refuse", "refused_calls"]

_FAREWELL_SECONDS = 1.0
# Oftener than anybody: a rank that has ended.
_ENDED = 1 << 62

_refused = 0
# In this process, the call of a rank that is in no group, as long as it has made no other since.
_last_words: tuple[int, str] | None = None


def is_no_members(group: Any) -> bool:
    """Whether `group` is what torch gives those who are not in a group that they made."""
    distributed = torch_distributed()
    return (
        distributed is not None and type(group) is int and group == distributed.GroupMember.NON_GROUP_MEMBER
    )


def refuse(group: Any, error: BaseException) -> None:
    """A call was refused with `error`, as nobody knows who is in `group`."""
    global _refused, _last_words
    # Where it cannot even be told there is nobody to wait.
    with contextlib.suppress(Exception):
        said = f"{type(error).__name__}: {error}"
        if is_no_members(group):
            _last_words = (
                os.getpid(),
                f"has ended, as it was to scatter in a group that it is not in ({said})",
            )
            return
        _refused += 1
        _tell(
            _refused,
            f"made {_refused} calls that were refused for their group, so that nobody knows of which scatter they were "
            f"rounds (the last one with {said})",
        )


def refused_calls() -> int:
    """How many such calls this process made. The calls of ranks that made different numbers of them may not meet."""
    return _refused


@contextlib.contextmanager
def heeding(*voters: Voter) -> Iterator[None]:
    """A block in whose votes nobody waits for a rank that made more of such calls than this one."""
    global _last_words
    _last_words = None
    with contextlib.ExitStack() as stack:
        for voter in voters:
            if len(voter.ranks) > 1:
                ranks = frozenset(voter.ranks) - {voter.rank}
                stack.enter_context(voter.extra_failure_source(functools.partial(_missed, ranks)))
        yield


def _missed(ranks: frozenset[int]) -> RankFailure | None:
    return _board().refused_of(ranks, _refused)


class _Board:
    """What all ranks have told. `store`: the job's. A thread that tells has one of its own."""

    def __init__(self, store: Any) -> None:
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._store = JobStore(store, "tundish-scatter-refused")
        self._count = 0
        # Numbers of what somebody is about to write.
        self._unread: list[str] = []
        self._told: dict[int, tuple[int, str]] = {}

    def tell(self, rank: int, number: int, text: str) -> None:
        self._store.connect()
        self._store.write(str(self._store.add("count", 1)), json.dumps([rank, number, text]))
        # Answered when that was taken in.
        self._store.add("count", 0)

    def refused_of(self, ranks: frozenset[int], number: int) -> RankFailure | None:
        """The lowest of `ranks` that was refused more often than `number` times."""
        # There may be votes of several groups at once.
        with self._lock:
            self._read()
            found = [rank for rank in ranks & self._told.keys() if self._told[rank][0] > number]
            return RankFailure(rank=min(found), text=self._told[min(found)][1]) if found else None

    def _read(self) -> None:
        self._store.connect()
        # One request as long as nobody is refused.
        count = int(self._store.read("count") or 0)
        self._unread += [str(one) for one in range(self._count + 1, count + 1)]
        self._count = count
        if self._unread:
            entries = dict(zip(self._unread, self._store.read_all(self._unread), strict=True))
            self._unread = [one for one, entry in entries.items() if entry is None]
            for rank, times, text in (json.loads(entry) for entry in entries.values() if entry is not None):
                self._told[rank] = max(self._told.get(rank, (0, "")), (times, text))


# By the default group, with which the job's store goes.
_boards: weakref.WeakKeyDictionary[Any, _Board] = weakref.WeakKeyDictionary()


def _board() -> _Board:
    world = torch_distributed().group.WORLD
    board = _boards.get(world)
    # A connection that came over a fork is the parent's.
    if board is None or board.process != os.getpid():
        board = _boards[world] = _Board(group_info(None).store)
    return board


def _tell(number: int, text: str) -> None:
    job = group_info(None)
    if job.store is not None:
        tell_aside(lambda: _Board(job.store).tell(job.rank, number, text), "tundish-scatter-refused")


@atexit.register
def _say_last_words() -> None:
    # Where the program goes on to its end the others have it, too.
    if (
        _last_words is not None
        and _last_words[0] == os.getpid()
        and getattr(sys, "last_value", None) is not None
    ):
        with contextlib.suppress(Exception):
            _tell(_ENDED, _last_words[1])
    wait_for_telling(_FAREWELL_SECONDS)
