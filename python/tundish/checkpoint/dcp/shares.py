"""Which of the ranks that load a checkpoint verifies which of its files.

What always holds: ranks that know the same manifest deal alike without asking each other; every file is one rank's;
none has much more to read than an even part, or than the largest file.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tundish.checkpoint.dcp.plan import rank_extra_name
from tundish.checkpoint.dcp.writer import file_name

__all__ = ["share_of"]

# What it takes to open a file of a parallel file system, in bytes read meanwhile.
_OPENING = 1 << 20

_File = tuple[str, int, str | None]


def share_of(index: int, count: int, files: Sequence[_File], savers: int) -> set[str]:
    """The names of those of `files`, saved by so many ranks, that the rank `index` of `count` verifies."""
    home_of = _homes(count, savers)
    ordered = sorted(files, key=lambda file: (-file[1], file[0]))
    loads = [0] * count
    limit = max((file[1] + _OPENING for file in files), default=0)
    limit = max(limit, -(-sum(file[1] + _OPENING for file in files) // count))
    mine: set[str] = set()
    homeless: list[_File] = []
    for file in ordered:
        home = home_of.get(file[0])
        if home is None or loads[home] + file[1] + _OPENING > limit:
            homeless.append(file)
            continue
        loads[home] += file[1] + _OPENING
        if home == index:
            mine.add(file[0])
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for name, size, _ in homeless:
        load, rank = least[0]
        heapq.heapreplace(least, (load + size + _OPENING, rank))
        if rank == index:
            mine.add(name)
    return mine


def _homes(count: int, savers: int) -> dict[str, int]:
    """The rank in the place of the one that saved a file, which mostly loads it next, from its node's memory.

    Where few saved what many load, their files go to ranks far from each other, which are on different nodes.
    """
    homes = {}
    for saver in range(savers):
        home = saver * count // savers
        homes[file_name(saver)] = homes[rank_extra_name(saver)] = home
    return homes
