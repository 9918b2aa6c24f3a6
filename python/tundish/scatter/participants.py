"""The ranks of a scatter, and the batch of each.

Invariants:
- `src` is a rank within the group. All other ranks are those of the job.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tundish.distributed import DEFAULT_TIMEOUT, Voter, group_info, torch_distributed, voter_of
from tundish.errors import InvalidInputError, InvalidTypeError, format_list, format_rank_list, format_ranks


@dataclass(frozen=True, kw_only=True)
class Participants:
    """The ranks of a scatter, as one of them sees it.

    Attributes:
        ranks: all ranks.
        batch_numbers: for each of them, the number of its batch.
        rank: this rank.
        source: the rank that has the data.
    """

    ranks: tuple[int, ...]
    batch_numbers: tuple[int, ...]
    rank: int
    source: int

    @property
    def batch_count(self) -> int:
        """How many batches a step has."""
        return max(self.batch_numbers) + 1

    def batch_number(self, rank: int) -> int:
        """The number of a rank's batch."""
        return self._number_by_rank[rank]

    @functools.cached_property
    def _number_by_rank(self) -> dict[int, int]:
        # Each step looks up every rank.
        return dict(zip(self.ranks, self.batch_numbers, strict=True))


def process_group(group: Any, what: str = "group") -> Any:
    """The process group of a `DeviceMesh` of one dimension; anything else as it is.

    Raises `InvalidInputError` for a mesh of several dimensions; `what` is the name of the argument.
    """
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
    """`src` as an int, whatever kind of integer it is."""
    try:
        if isinstance(src, bool):
            raise TypeError
        return operator.index(src)
    except TypeError:
        raise InvalidTypeError(f"src is {src!r}: give the rank of the source within the group") from None


def participants_of(group: Any, src: Any) -> Participants:
    """The participants of a scatter from rank `src` of `group`."""
    member = group_info(group)
    src = source_index(src)
    size = len(member.ranks)
    if not 0 <= src < size:
        raise InvalidInputError(
            f"src is {src}: it is a rank within the group, which has {size} of them (0 to {size - 1})"
        )
    return Participants(
        ranks=member.ranks,
        batch_numbers=tuple(range(len(member.ranks))),
        rank=member.rank,
        source=member.ranks[src],
    )


@contextlib.contextmanager
def agree_on_participants(
    group: Any, src: Any, replicate: Any
) -> Iterator[tuple[Voter, Participants, timedelta]]:
    """Collective: the voter, the participants and the timeout of a scatter; see `scatter_batch`.

    `group` and `replicate` are process groups. The voter may end with the block. If an argument is wrong on one rank,
    all ranks raise an error.
    """
    what, timeout = "finding the participants of a scatter", _timeout_of(group)
    if replicate is None:
        voter = voter_of(group)
        with voter.agreed(what, timeout=timeout):
            participants = participants_of(group, src)
        yield voter, participants, timeout
        return
    with contextlib.ExitStack() as votes:
        # Along both dimensions, so that every rank of the grid hears of an error.
        same_batch = voter_of(replicate)
        votes.enter_context(same_batch.agreed(what, timeout=timeout))
        # A rank with a bad `group` still votes with the ranks that get the same batch.
        with contextlib.suppress(InvalidInputError, InvalidTypeError):
            votes.enter_context(voter_of(group).agreed(what, timeout=timeout))
        participants = replicated_participants(same_batch, group, src, what=what, timeout=timeout)
    with Voter(ranks=participants.ranks, timeout=timeout) as voter:
        yield voter, participants, timeout


def replicated_participants(
    voter: Voter, group: Any, src: Any, *, what: str, timeout: timedelta
) -> Participants:
    """The participants of a scatter in which ranks of several groups get the same batch.

    Collective over `voter`, whose members get the same batch. Each has another `group`.
    """
    error: Exception | None = None
    mine = ""
    try:
        own = participants_of(group, src)
        mine = json.dumps((own.ranks, own.batch_number(own.rank)))
    except (InvalidInputError, InvalidTypeError) as caught:
        error = caught
    all_groups = json.loads(voter.combine(mine, _as_list, error, what=what, timeout=timeout))
    groups, positions = zip(*all_groups, strict=True)
    ranks = tuple(rank for group in groups for rank in group)
    if len(set(ranks)) != len(ranks) or any(len(group) != len(own.ranks) for group in groups):
        raise InvalidInputError(
            f"group and replicate do not make a grid: {format_ranks(voter.ranks)}, which get the same batch, are in "
            f"the groups {_format_groups(groups)}; give two dimensions of one mesh"
        )
    if len(set(positions)) > 1:
        raise InvalidInputError(
            f"{format_ranks(voter.ranks)}, which are to get the same batch, have the positions "
            f"{format_rank_list(positions)} in the groups {_format_groups(groups)}: give a mesh whose ranks "
            "rise along both dimensions"
        )
    return Participants(
        ranks=ranks,
        batch_numbers=own.batch_numbers * len(groups),
        rank=own.rank,
        source=ranks[own.ranks.index(own.source)],
    )


def _as_list(answers: list[str]) -> str:
    return f"[{', '.join(answers)}]"


def _timeout_of(group: Any) -> timedelta:
    """The timeout of a group's collectives."""
    distributed = torch_distributed()
    if distributed is None:
        return DEFAULT_TIMEOUT
    if group is None and distributed.is_initialized():
        group = distributed.group.WORLD
    if not isinstance(group, distributed.ProcessGroup):
        return DEFAULT_TIMEOUT
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return distributed.distributed_c10d.default_pg_timeout  # type: ignore[no-any-return]


def _format_groups(groups: Sequence[Sequence[int]]) -> str:
    """Format groups of ranks, as in "[0-7], [8-15] and 30 more"."""
    return format_list([f"[{format_rank_list(group)}]" for group in groups])
