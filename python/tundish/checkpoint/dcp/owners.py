"""Which rank saves what several of them hold: a replicated part of a DTensor, a plain tensor, another object.

What always holds: ranks that know the same census choose alike without asking each other; every part that some
rank holds is chosen by exactly one of those that hold it. The bytes of tensors are spread evenly, the largest first,
each to the rank that has least, as DCP's own planner does; other objects are saved by the lowest rank that has them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tundish.checkpoint.dcp.leaves import Leaves
from tundish.checkpoint.dcp.outline import Census, Entry
from tundish.checkpoint.tensors import local_of
from tundish.errors import InvalidInputError

__all__ = ["owned_by"]

_Ranks = tuple[int, ...]
# Minus its size, its name, its number among the leaves: the same order on all ranks, the largest first.
_Part = tuple[int, str, int]


def owned_by(rank: int, leaves: Leaves, census: Census) -> list[bool]:
    """For each leaf that `rank` holds, whether it saves it.

    Raises `InvalidInputError` where another rank holds something else under the same name.
    """
    holders_of = _Holders(rank, census)
    owned = [False] * len(leaves.values)
    shared: dict[_Ranks, list[_Part]] = {}
    for number, (name, value) in enumerate(leaves):
        holders = holders_of(name)
        if rank not in holders:
            continue
        if not isinstance(value, torch.Tensor):
            owned[number] = holders[0] == rank
            continue
        local = local_of(value)
        if local.numel() == 0 and value.numel() > 0:
            continue  # the ranks did not divide the tensor, and this one got nothing of it
        shared.setdefault(holders, []).append((-local.nbytes, name, number))
    for holders, parts in shared.items():
        for number in _share_of(rank, holders, parts):
            owned[number] = True
    return owned


class _Holders:
    """Finds the ranks that hold the same part of something as `rank` does, ascending."""

    def __init__(self, rank: int, census: Census) -> None:
        self._rank = rank
        self._census = census
        self._own = next(outline for outline, ranks in census if rank in ranks)
        self._known: dict[Any, _Ranks] = {}

    def __call__(self, name: str) -> _Ranks:
        own = self._own[name]
        found: list[tuple[int, Entry]] = []
        for number, (outline, ranks) in enumerate(self._census):
            entry = outline.get(name)
            if entry is None:
                continue
            if not entry.is_like(own):
                raise InvalidInputError(
                    f"{name!r} is {own} on rank {self._rank} and {entry} on rank {min(ranks)}: give different things "
                    "different names"
                )
            found.append((number, entry))
        key = own.replicated, tuple((number, id(entry.mesh)) for number, entry in found)
        if key not in self._known:
            self._known[key] = self._find(own, found)
        return self._known[key]

    def _find(self, own: Entry, found: Sequence[tuple[int, Entry]]) -> _Ranks:
        if own.mesh is None:
            return tuple(sorted(rank for number, _ in found for rank in self._census[number][1]))
        places = np.argwhere(np.reshape(own.mesh.ranks, own.mesh.size) == self._rank)
        if len(places) == 0:
            return ()  # the rank knows of the tensor and has no part of it
        index = tuple(
            slice(None) if replicated else int(place)
            for replicated, place in zip(own.replicated, places[0], strict=True)
        )
        holders: set[int] = set()
        for number, entry in found:
            if entry.mesh is not None:
                same_part = np.reshape(entry.mesh.ranks, entry.mesh.size)[index].reshape(-1).tolist()
                holders.update(self._census[number][1].intersection(same_part))
        return tuple(sorted(holders))


def _share_of(rank: int, holders: _Ranks, parts: list[_Part]) -> list[int]:
    """The numbers of those of `parts`, all held by all of `holders`, that `rank` saves."""
    if len(holders) == 1:
        return [number for _, _, number in parts]
    loads = [(0, holder) for holder in holders]
    mine = []
    for size, _, number in sorted(parts):
        load, holder = heapq.heappop(loads)
        # What is empty weighs something too, or one rank would get all of it.
        heapq.heappush(loads, (load + max(-size, 1), holder))
        if holder == rank:
            mine.append(number)
    return mine
