"""A `Scatterer` for a group, as callers name it.

What always holds: all who take part open theirs in the same round of votes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from tundish.distributed import DEFAULT_TIMEOUT, Voter, voter_of
from tundish.distributed.jobstore import distributed_module
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.scatter.direct import direct_backend
from tundish.scatter.place import Place, place_of, replicated_place_of
from tundish.scatter.scatterer import Scatterer

__all__ = ["open_scatterer", "taking_part"]


@contextlib.contextmanager
def taking_part(group: Any, src: Any, replicate: Any) -> Iterator[tuple[Voter, Place, timedelta]]:
    """Collective: the votes, the place and the timeout of those who take part; see `scatter_batch`.

    `group` and `replicate` are process groups. The votes may end with the block.
    """
    timeout = timeout_of(group)
    if replicate is None:
        voter = voter_of(group)
        try:
            place = place_of(group, src)
        except (InvalidInputError, InvalidTypeError) as error:
            # The others are at the first vote of the block.
            voter.vote(error, what="finding the source", timeout=timeout)
            raise
        yield voter, place, timeout
        return
    place = replicated_place_of(group, src, replicate, timeout=timeout)
    with Voter.among(place.ranks, timeout=timeout) as voter:
        yield voter, place, timeout


def open_scatterer(group: Any, src: Any, replicate: Any = None, *, shared_memory: bool = True) -> Scatterer:
    """Collective over all who take part: a scatter from rank `src` of `group`."""
    with taking_part(group, src, replicate) as (voter, place, timeout):
        return Scatterer(
            voter, place, timeout=timeout, shared_memory=shared_memory, direct=direct_backend(group)
        )


def timeout_of(group: Any) -> timedelta:
    """How long the collectives of `group` wait."""
    distributed = distributed_module()
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
