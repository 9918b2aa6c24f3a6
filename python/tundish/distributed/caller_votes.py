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
    """The voter that a group's calling threads share. It lives as long as the group; nobody closes it.

    The ranks of a node watch each other from the group's first vote on, also between calls.

    Raises:
        InvalidInputError: as `vote`.
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
    """Collective over `group`: report this rank's status; return when every rank reported success.

    All members call it in the same order, each on one thread; a background thread uses a `Voter`. In a world of one it
    raises `error`, if any.

    The other ranks of its node notice a killed rank within 1 s, if it voted before in `group` or in the whole job.
    Otherwise they wait for it until the timeout.

    Args:
        error: this rank's error; None if its work succeeded.
        what: the step voted on, for messages: "loading the data".
        same: a text that must be equal on all ranks, such as a hash of the configuration. All ranks give it or none.
        group: the `ProcessGroup` (None: all ranks).
        timeout: how long this rank waits for the others; seconds or a `timedelta`. None waits for as long as it takes.

    Raises:
        The `error` given, on the rank that gave it.
        PeerFailedError: another rank failed or was killed. `rank` is the lowest of them; the message contains the
            errors of up to eight ranks.
        VoteTimeoutError: a rank did not vote in time (`ranks` names up to 256 of them), or this rank came after the
            others had given up. The next vote works.
        JobStoreLostError: the store of the launcher is gone.
        InvalidInputError: the timeout is not positive, `same` is empty, this rank is not in `group`, or `WORLD_SIZE`
            says that there are several processes but no process group is initialised.
        InvalidTypeError: `error` is not an exception, or `timeout` is neither a number nor a `timedelta`.

    Example:
        >>> vote(what="loading the data")
        >>> vote(what="comparing the vocabularies", same="sha256:2c26b46b")
    """
    voter_of(group).vote(error, what=what, same=same, timeout=timeout)


def agreed(
    what: str, *, group: Any = None, timeout: timedelta | float | None = DEFAULT_TIMEOUT
) -> contextlib.AbstractContextManager[None]:
    """Collective over `group`: a block of fallible work that ends in a `vote`.

    If the block raises on one rank, its error goes on there, and the vote raises `PeerFailedError` on all others.

    Args:
        what: as in `vote`.
        group: as in `vote`.
        timeout: as in `vote`.

    Returns:
        The context manager of the block.

    Raises:
        The errors of `vote`, at the end of the block.

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
    """Collective over `group`: run `build` on one rank of every node while the others wait.

    Args:
        build: slow work that may raise anything.
        what: a name of the result, for messages.
        group: the `ProcessGroup` (None: all ranks).
        timeout: how long the others wait for the builders; None, the default, for as long as they take.

    Returns:
        The result of `build` on the ranks that ran it, None on the others.

    Raises:
        The errors of `vote`: the builder's own error on its rank, `PeerFailedError` on all others.

    Example:
        >>> build_once_per_node(lambda: 42, what="building the answer")
        42
    """
    return voter_of(group).build_once_per_node(build, what=what, timeout=timeout)
