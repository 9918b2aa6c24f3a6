"""Which of the ranks that load a checkpoint verifies what of its files.

What always holds: ranks that know the same manifest deal alike without asking each other; every byte is one rank's;
none has much more to read than an even part, or than the largest file that is not cut. A file that is larger than an
even part is cut where its checksum can be put together from those of its parts, and then these are dealt.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tundish.checkpoint.dcp.plan import rank_extra_name
from tundish.checkpoint.dcp.writer import file_name

__all__ = ["Share", "cuts_of", "share_of"]

# What it takes to open a file of a parallel file system, in bytes read meanwhile.
_OPENING = 1 << 20
# To compare the parts of a file costs another two votes, some milliseconds: a smaller file is read meanwhile.
_LEAST_PART = 256 << 20

_File = tuple[str, int, str | None]
# A file's name, the first byte, and how many.
Part = tuple[str, int, int]


@dataclass
class Share:
    """What one rank verifies: `whole` files, by name, and `parts` of others."""

    whole: set[str] = field(default_factory=set)
    parts: list[Part] = field(default_factory=list)


def cuts_of(count: int, files: Sequence[_File]) -> dict[str, list[Part]]:
    """Of those of `files` that are cut for `count` ranks, the parts in order."""
    even = -(-sum(size for _, size, _ in files) // count)
    longest = max(_LEAST_PART, even)
    return {
        name: [(name, start, min(longest, size - start)) for start in range(0, size, longest)]
        for name, size, checksum in files
        if size > longest and checksum is not None
    }


def share_of(
    index: int, count: int, files: Sequence[_File], savers: int, cuts: dict[str, list[Part]]
) -> Share:
    """What the rank `index` of `count` verifies of `files`, saved by so many ranks and cut as `cuts` say."""
    share = Share()
    for part, is_whole in _dealt(index, count, files, savers, cuts):
        if is_whole:
            share.whole.add(part[0])
        else:
            share.parts.append(part)
    return share


def _dealt(
    index: int, count: int, files: Sequence[_File], savers: int, cuts: dict[str, list[Part]]
) -> Iterator[tuple[Part, bool]]:
    """What is dealt to `index`, and whether that is a whole file."""
    home_of = _homes(count, savers)
    pieces = [piece for name, size, _ in files for piece in cuts.get(name, [(name, 0, size)])]
    pieces.sort(key=lambda piece: (-piece[2], piece[:2]))
    loads = [0] * count
    limit = max((size + _OPENING for _, _, size in pieces), default=0)
    limit = max(limit, -(-sum(size + _OPENING for _, _, size in pieces) // count))
    homeless = []
    for piece in pieces:
        name, _, size = piece
        home = home_of.get(name)
        if home is None or loads[home] + size + _OPENING > limit:
            homeless.append(piece)
            continue
        loads[home] += size + _OPENING
        if home == index:
            yield piece, name not in cuts
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for piece in homeless:
        name, _, size = piece
        load, rank = least[0]
        heapq.heapreplace(least, (load + size + _OPENING, rank))
        if rank == index:
            yield piece, name not in cuts


def _homes(count: int, savers: int) -> dict[str, int]:
    """The rank in the place of the one that saved a file, which mostly loads it next, from its node's memory.

    Where few saved what many load, their files go to ranks far from each other, which are on different nodes.
    """
    homes = {}
    for saver in range(savers):
        home = saver * count // savers
        homes[file_name(saver)] = homes[rank_extra_name(saver)] = home
    return homes
