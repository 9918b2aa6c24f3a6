"""Votes on the calling threads of a group's ranks, with one voter that lives as long as the group."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from tundish.distributed.job_store import torch_distributed
from tundish.distributed.process_groups import group_info
from tundish.distributed.voter import DEFAULT_TIMEOUT, Voter, group_voters

__all__ = ["agreed", "build_once_per_node", "vote", "voter_of"]

T = TypeVar("T")

_voters_lock = threading.Lock()


def voter_of(group: Any) -> Voter:
    """The voter of a group's calling threads, which lives as long as the group; nobody closes it.

    Its members watch one another from the group's first vote on, also between calls.

    Raises:
        InvalidInputError: as `vote` does.
    """
    if len(group_info(group).ranks) == 1:
        return Voter(group, first_vote=False)
    key = torch_distributed().group.WORLD if group is None else group
    with _voters_lock:
        voter = group_voters.get(key)
        if voter is None:
            voter = group_voters[key] = Voter(group, first_vote=False)
            # At exit the kernel closes everything; a finaliser would only meet a half-dead interpreter.
            weakref.finalize(key, voter.close).atexit = False
    return voter


def vote(
    error: BaseException | None = None,
    *,
    what: str,
    same: str | None = None,
    group: Any = None,
    timeout: timedelta | float | None = DEFAULT_TIMEOUT,
) -> None:
    """Collective over `group` (None: all ranks): bring this rank's status; see `Voter.vote`.

    With `same` all ranks make sure that they go on with the same: a hash of the configuration, the step.

    All members call it from one thread each, in the same order; a background thread uses a `Voter`. In a world of one
    it raises `error`, if any. A killed peer is noticed by the others of its node once it came to a vote of the group,
    or of the whole job; one that was gone before is waited for.

    Raises:
        What `Voter.vote` raises.
        InvalidInputError: this rank is not in `group`, or `WORLD_SIZE` says that there are several processes but no
            process group is initialised.

    Example:
        >>> vote(what="loading the data")
        >>> vote(what="comparing the vocabularies", same="sha256:2c26b46b")
    """
    voter_of(group).vote(error, what=what, same=same, timeout=timeout)


def agreed(
    what: str, *, group: Any = None, timeout: timedelta | float | None = DEFAULT_TIMEOUT
) -> contextlib.AbstractContextManager[None]:
    """Collective over `group`: a block of fallible work that ends in a vote; see `Voter.vote`.

    If the block raises, the other ranks are told and its error is raised again. If it ends well, it raises when it
    failed on another rank.

    Example:
        >>> with agreed("loading the data"):
        ...     lengths = [3, 4]
    """
    return voter_of(group).agreed(what, timeout=timeout)


def build_once_per_node(
    build: Callable[[], T],
    *,
    what: str,
    group: Any = None,
    timeout: timedelta | float | None = None,
) -> T | None:
    """Collective over `group`: run `build` on one rank of every node; see `Voter.build_once_per_node`.

    Example:
        >>> build_once_per_node(lambda: 42, what="building the answer")
        42
    """
    return voter_of(group).build_once_per_node(build, what=what, timeout=timeout)
