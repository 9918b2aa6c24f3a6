"""A `ScatterSession` for a group, as callers name it.

What always holds: all who take part open theirs in the same round of votes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from tundish.distributed import DEFAULT_TIMEOUT, Voter, torch_distributed, voter_of
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.scatter.participants import Place, participants_of, process_group, replicated_participants
from tundish.scatter.refusals import heeding, refuse
from tundish.scatter.source import ScatterSession
from tundish.scatter.transport.device import direct_backend

__all__ = ["group_of", "open_scatterer", "taking_part"]


def group_of(group: Any, what: str = "group") -> Any:
    """As `process_group`; where it cannot be told what is meant, whoever waits for this rank hears of it."""
    try:
        return process_group(group, what)
    except Exception as error:
        refuse(group, error)
        raise


@contextlib.contextmanager
def taking_part(group: Any, src: Any, replicate: Any) -> Iterator[tuple[Voter, Place, timedelta]]:
    """Collective: the votes, the place and the timeout of those who take part; see `scatter_batch`.

    `group` and `replicate` are process groups. The votes may end with the block.
    """
    timeout = timeout_of(group)
    if replicate is None:
        voter = _voter_of(group)
        with heeding(voter):
            try:
                place = participants_of(group, src)
            except (InvalidInputError, InvalidTypeError) as error:
                # The others are at the first vote of the block.
                voter.vote(error, what="finding the source", timeout=timeout)
                raise
            yield voter, place, timeout
        return
    mates, beside = _voter_of(replicate), None
    # Those who get the same hear of a group that is none from this rank itself.
    with contextlib.suppress(InvalidInputError, InvalidTypeError):
        beside = _voter_of(group)
    with heeding(mates) if beside is None else heeding(mates, beside):
        place = replicated_participants(group, src, mates, beside, timeout=timeout)
    with Voter.among(place.ranks, timeout=timeout) as voter, heeding(voter):
        yield voter, place, timeout


def _voter_of(group: Any) -> Voter:
    try:
        return voter_of(group)
    except Exception as error:
        # Those who are in the right one wait for this rank.
        refuse(group, error)
        raise


def open_scatterer(
    group: Any, src: Any, replicate: Any = None, *, shared_memory: bool = True
) -> ScatterSession:
    """Collective over all who take part: a scatter from rank `src` of `group`."""
    with taking_part(group, src, replicate) as (voter, place, timeout):
        return ScatterSession(
            voter, place, timeout=timeout, shared_memory=shared_memory, direct=direct_backend(group)
        )


def timeout_of(group: Any) -> timedelta:
    """How long the collectives of `group` wait."""
    distributed = torch_distributed()
    if distributed is None:
        return DEFAULT_TIMEOUT
    if group is None and distributed.is_initialized():
        group = distributed.group.WORLD
    # Those who are not in a group have a number in its place.
    if isinstance(group, distributed.ProcessGroup):
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            found = getattr(options, "_timeout", None)
            if isinstance(found, timedelta):
                return found
        return distributed.distributed_c10d.default_pg_timeout  # type: ignore[no-any-return]
    return DEFAULT_TIMEOUT
