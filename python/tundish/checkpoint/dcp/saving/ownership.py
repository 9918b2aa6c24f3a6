"""Decides which rank saves a value that several ranks hold.

Invariants: ranks with the same summaries decide alike without communication, and exactly one holder of each part saves
it. Tensors are assigned the largest first, each to the rank with the fewest bytes, as DCP's own planner does. The
lowest rank saves an object that is no tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tundish.checkpoint.dcp.flattened_state import FlattenedState
from tundish.checkpoint.dcp.saving.state_summary import SummariesByRank, ValueSummary
from tundish.checkpoint.tensors import local_of
from tundish.errors import InvalidInputError

__all__ = ["owned_values"]

_Ranks = tuple[int, ...]
# Minus its size, its name, its index: sorted, the largest comes first, in the same order on all ranks.
_Part = tuple[int, str, int]


def owned_values(rank: int, state: FlattenedState, summaries: SummariesByRank) -> list[bool]:
    """For each value that `rank` holds, whether it saves it.

    Raises:
        InvalidInputError: another rank holds something else under the same name.
    """
    holders_of = _Holders(rank, summaries)
    owned = [False] * len(state.values)
    shared: dict[_Ranks, list[_Part]] = {}
    for number, (name, value) in enumerate(state):
        holders = holders_of(name)
        if rank not in holders:
            continue
        if not isinstance(value, torch.Tensor):
            owned[number] = holders[0] == rank
            continue
        local = local_of(value)
        if local.numel() == 0 and value.numel() > 0:
            continue  # an uneven division left this rank nothing
        shared.setdefault(holders, []).append((-local.nbytes, name, number))
    for holders, parts in shared.items():
        for number in _assigned(rank, holders, parts):
            owned[number] = True
    return owned


class _Holders:
    """Finds the ranks that hold the same part of a value as `rank`, ascending."""

    def __init__(self, rank: int, summaries: SummariesByRank) -> None:
        self._rank = rank
        self._summaries = summaries
        self._own = next(summary for summary, ranks in summaries if rank in ranks)
        self._known: dict[Any, _Ranks] = {}

    def __call__(self, name: str) -> _Ranks:
        own = self._own[name]
        found: list[tuple[int, ValueSummary]] = []
        for number, (summary, ranks) in enumerate(self._summaries):
            value = summary.get(name)
            if value is None:
                continue
            if not value.matches(own):
                raise InvalidInputError(
                    f"{name!r} is {own} on rank {self._rank} and {value} on rank {min(ranks)}: give different things "
                    "different names"
                )
            found.append((number, value))
        key = own.replicated, tuple((number, id(value.mesh)) for number, value in found)
        if key not in self._known:
            self._known[key] = self._find(own, found)
        return self._known[key]

    def _find(self, own: ValueSummary, found: Sequence[tuple[int, ValueSummary]]) -> _Ranks:
        if own.mesh is None:
            return tuple(sorted(rank for number, _ in found for rank in self._summaries[number][1]))
        positions = np.argwhere(np.reshape(own.mesh.ranks, own.mesh.size) == self._rank)
        if len(positions) == 0:
            return ()  # the rank has no part of the tensor
        index = tuple(
            slice(None) if replicated else int(position)
            for replicated, position in zip(own.replicated, positions[0], strict=True)
        )
        holders: set[int] = set()
        for number, value in found:
            if value.mesh is not None:
                same_part = np.reshape(value.mesh.ranks, value.mesh.size)[index].reshape(-1).tolist()
                holders.update(self._summaries[number][1].intersection(same_part))
        return tuple(sorted(holders))


def _assigned(rank: int, holders: _Ranks, parts: list[_Part]) -> list[int]:
    """The indices of the `parts`, each held by all of `holders`, that `rank` saves."""
    if len(holders) == 1:
        return [number for _, _, number in parts]
    loads = [(0, holder) for holder in holders]
    mine = []
    for size, _, number in sorted(parts):
        load, holder = heapq.heappop(loads)
        # Empty parts count too, or one rank would get all of them.
        heapq.heappush(loads, (load + max(-size, 1), holder))
        if holder == rank:
            mine.append(number)
    return mine
