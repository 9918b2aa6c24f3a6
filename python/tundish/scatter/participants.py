"""Who takes part in a scatter, and which batch is whose.

Owns the reading of `group`, `src` and `replicate`. What always holds: `src` is a rank within the group, all others in
a `Place` are the job's.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tundish.distributed import Voter, group_info
from tundish.errors import InvalidInputError, InvalidTypeError, listed, ranks_named

__all__ = [
    "Place",
    "participants_of",
    "process_group",
    "replicated_participants",
    "source_index",
]

# Of groups, in a message.
_SHOWN_GROUPS = 8


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place among those who take part.

    Attributes:
        ranks: of all who take part.
        batch_of: for each of them, the number of its batch.
        rank: this one.
        source: the one who has the data.
    """

    ranks: tuple[int, ...]
    batch_of: tuple[int, ...]
    rank: int
    source: int

    @property
    def batches(self) -> int:
        """How many batches a round has."""
        return max(self.batch_of) + 1

    def batch(self, rank: int) -> int:
        """The number of a rank's batch."""
        return self._batches[rank]

    @functools.cached_property
    def _batches(self) -> dict[int, int]:
        # Asked for every rank in every round.
        return dict(zip(self.ranks, self.batch_of, strict=True))


def process_group(group: Any, what: str = "group") -> Any:
    """The process group that is meant: `group` itself, or that of a `DeviceMesh` of one dimension."""
    if group is None or not hasattr(group, "get_group"):
        return group
    if group.ndim != 1:
        names = group.mesh_dim_names or ()
        example = f'mesh["{names[0]}"]' if names else 'mesh["data"], of a mesh with mesh_dim_names'
        several = "; for several of them together give mesh[…]._flatten()" if what == "replicate" else ""
        raise InvalidInputError(
            f"{what} is a DeviceMesh of {group.ndim} dimensions: give one, as in {example}{several}"
        )
    return group.get_group()


def source_index(src: Any) -> int:
    """`src` as a number, whatever kind of integer it is."""
    try:
        if isinstance(src, bool):
            raise TypeError
        return operator.index(src)
    except TypeError:
        raise InvalidTypeError(f"src is {src!r}: give the rank of the source within the group") from None


def participants_of(group: Any, src: Any) -> Place:
    """The place of this process in `group`, whose rank `src` has the data."""
    member = group_info(group)
    src = source_index(src)
    size = len(member.ranks)
    if not 0 <= src < size:
        raise InvalidInputError(
            f"src is {src}: it is a rank within the group, which has {size} of them (0 to {size - 1})"
        )
    return Place(
        ranks=member.ranks,
        batch_of=tuple(range(len(member.ranks))),
        rank=member.rank,
        source=member.ranks[src],
    )


def replicated_participants(
    group: Any, src: Any, voter: Voter, beside: Voter | None, *, timeout: timedelta
) -> Place:
    """Collective over `voter`: the place of this process in `group`, with all that get the same as its ranks.

    The ranks of `voter` are this one and those that get the same batch, each of which has a `group` of its own. The
    first of them is of the source's. `beside`: the voter of `group`; None where that is none.
    """
    what = "finding who gets the same batch"
    place: Place | None = None
    error: Exception | None = None
    try:
        place = _replicated(voter, group, src, what=what, timeout=timeout)
    except Exception as caught:  # noqa: BLE001 (raised once the others know)
        error = caught
    # Over both, so that every rank of the grid hears of it.
    if beside is not None:
        try:
            beside.vote(error, what=what, timeout=timeout)
        except Exception as told_by_group:  # noqa: BLE001 (raised once the others know)
            error = error or told_by_group
    voter.vote(error, what=what, timeout=timeout)
    assert place is not None  # noqa: S101 (for the type checker)
    return place


def _named(groups: Sequence[Sequence[int]]) -> str:
    """Groups, for messages: "[0-7], [8-15] and 30 more"."""
    shown = ", ".join(f"[{listed(group)}]" for group in groups[:_SHOWN_GROUPS])
    return shown + (f" and {len(groups) - _SHOWN_GROUPS} more" if len(groups) > _SHOWN_GROUPS else "")


def _replicated(voter: Voter, group: Any, src: Any, *, what: str, timeout: timedelta) -> Place:
    error: Exception | None = None
    mine = ""
    try:
        own = participants_of(group, src)
        mine = json.dumps((own.ranks, own.batch(own.rank)))
    except (InvalidInputError, InvalidTypeError) as caught:
        error = caught
    gathered = voter.gather(mine, error, what=what, timeout=timeout)
    told = json.dumps([json.loads(one) for one in gathered]) if gathered else None
    heard = json.loads(voter.broadcast(told, source=voter.ranks[0], what=what, timeout=timeout))
    groups, positions = zip(*heard, strict=True)
    ranks = tuple(rank for group in groups for rank in group)
    if len(set(ranks)) != len(ranks) or any(len(group) != len(own.ranks) for group in groups):
        raise InvalidInputError(
            f"group and replicate do not make a grid: {ranks_named(voter.ranks)}, which get the same batch, are in the "
            f"groups {_named(groups)}; give two dimensions of one mesh"
        )
    if len(set(positions)) > 1:
        raise InvalidInputError(
            f"{ranks_named(voter.ranks)}, which are to get the same batch, are at the places {listed(positions)} of "
            f"the groups {_named(groups)}, which are in the order of ranks: give a mesh whose ranks rise along both "
            "dimensions"
        )
    return Place(
        ranks=ranks,
        batch_of=own.batch_of * len(groups),
        rank=own.rank,
        source=ranks[own.ranks.index(own.source)],
    )
