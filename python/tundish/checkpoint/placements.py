"""Computes which rank holds which part of a DTensor.

A part is a product of runs: for each dimension the (start, length) stretches of the rank, in the order of its local
tensor. `Shard` cuts as `torch.chunk` does. `_StridedShard`, which FSDP2 over tensor parallelism makes, cuts into
`split_factor` pieces first and then each of them.

Invariants:
    - The parts of one replica cover each element of the tensor once, even if its dimensions do not divide evenly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tundish.checkpoint.tensors import local_of
from tundish.errors import InvalidInputError

Run = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """The part of a tensor on one global rank: its runs of each dimension."""

    rank: int
    runs: tuple[tuple[Run, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return tuple(sum(length for _, length in runs) for runs in self.runs)


def rank_parts_of(tensor: Any, reader: int) -> tuple[RankPart, ...]:
    """The parts of a DTensor in the replica that the global rank `reader` belongs to.

    Returns nothing if `reader` is not on the mesh. Ranks with an empty part are left out.
    """
    mesh = tensor.device_mesh
    return _rank_parts(
        tuple(mesh.mesh.flatten().tolist()),
        tuple(mesh.mesh.shape),
        tuple(_cut(placement) for placement in tensor.placements),
        tuple(tensor.shape),
        reader,
    )


def is_sharded_over_ranks(tensor: Any) -> bool:
    """Whether ranks hold different parts of a DTensor; a mesh dimension of one rank does not cut."""
    return any(
        not placement.is_replicate() and (size > 1 or _cut(placement) is None)
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def check_placement(name: str, tensor: Any, rank: int) -> None:
    """Refuse a DTensor with an unknown placement, or with a local tensor that does not match its placement.

    Raises `InvalidInputError`.
    """
    for placement in tensor.placements:
        if not (placement.is_replicate() or _cut(placement) is not None):
            raise InvalidInputError(
                f"{name!r} is a DTensor placed {tensor.placements}, and {type(placement).__name__} is not known: "
                "redistribute it to Shard or Replicate first"
            )
    local = tuple(local_of(tensor).shape)
    own = [rank_part.shape for rank_part in rank_parts_of(tensor, rank) if rank_part.rank == rank]
    is_empty = not own and 0 in local
    if tensor.device_mesh.get_coordinate() is not None and own != [local] and not is_empty:
        raise InvalidInputError(
            f"{name!r} is a DTensor of shape {tuple(tensor.shape)} placed {tensor.placements}, by which rank {rank} "
            f"holds {own[0] if own else 'nothing'}, but its local tensor has shape {local}: cut it as torch.chunk does"
        )


def rectangles(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The rectangles of a part: the slices of each in the whole tensor, and in the local one."""
    pairs: list[list[tuple[slice, slice]]] = []
    for stretches in runs:
        at = 0
        pairs.append([])
        for start, length in stretches:
            pairs[-1].append((slice(start, start + length), slice(at, at + length)))
            at += length
    for chosen in itertools.product(*pairs):
        yield tuple(whole for whole, _ in chosen), tuple(local for _, local in chosen)


def _cut(placement: Any) -> tuple[int, int] | None:
    """Dimension and split factor of a placement; None if it does not cut, or is not known."""
    if type(placement).__name__ == "_StridedShard":
        return placement.dim, int(placement.split_factor)
    return (placement.dim, 1) if placement.is_shard() and type(placement).__name__ == "Shard" else None


@functools.lru_cache(maxsize=4096)
def _rank_parts(
    ranks: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    cuts: tuple[tuple[int, int] | None, ...],
    shape: tuple[int, ...],
    reader: int,
) -> tuple[RankPart, ...]:
    if reader not in ranks:
        return ()
    coordinates = list(itertools.product(*map(range, mesh_shape)))
    home = coordinates[ranks.index(reader)]
    rank_parts = []
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        if any(cut is None and own != at for cut, own, at in zip(cuts, home, coordinate, strict=True)):
            continue
        runs: list[tuple[Run, ...]] = [((0, size),) for size in shape]
        for cut, at, count in zip(cuts, coordinate, mesh_shape, strict=True):
            if cut is not None:
                runs[cut[0]] = _strided(runs[cut[0]], cut[1], count, at)
        rank_part = RankPart(rank=rank, runs=tuple(runs))
        if 0 not in rank_part.shape:
            rank_parts.append(rank_part)
    return tuple(rank_parts)


def _strided(runs: tuple[Run, ...], split_factor: int, parts: int, at: int) -> tuple[Run, ...]:
    taken: list[Run] = []
    for piece in range(split_factor):
        for start, length in _chunk(_chunk(runs, split_factor, piece), parts, at):
            # Neighbours are joined, so that most parts are a single rectangle.
            if taken and sum(taken[-1]) == start:
                taken[-1] = (taken[-1][0], taken[-1][1] + length)
            else:
                taken.append((start, length))
    return tuple(taken)


def _chunk(runs: tuple[Run, ...], parts: int, at: int) -> tuple[Run, ...]:
    """Chunk `at` of the chunks that `torch.chunk(parts)` makes of the elements of `runs`."""
    total = sum(length for _, length in runs)
    size = -(-total // parts)
    first, last = size * at, min(size * (at + 1), total)
    taken = []
    before = 0
    for start, length in runs:
        low, high = max(first, before), min(last, before + length)
        if low < high:
            taken.append((start + low - before, high - low))
        before += length
    return tuple(taken)
