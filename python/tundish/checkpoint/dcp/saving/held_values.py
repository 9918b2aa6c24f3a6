"""The values that a rank holds, and which rank saves a value that several hold.

Invariants:
    - Exactly one holder saves each block of a tensor and each object.
    - The blocks that are saved make up each tensor.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from tundish.checkpoint.dcp.flattened_state import FlattenedState
from tundish.checkpoint.placements import check_placement, shares_for
from tundish.checkpoint.tensors import local_of
from tundish.errors import InvalidInputError

__all__ = ["HeldValue", "HeldValues", "assign", "held_values"]


class HeldValue(NamedTuple):
    """A value as one rank holds it.

    Attributes:
        path: keys that lead to it in the state dict.
        dtype: such as "float32"; empty for a value that is no tensor.
        size: shape of the whole tensor.
        offsets, lengths: the block of it that the rank holds.
    """

    path: tuple[str | int, ...]
    dtype: str = ""
    size: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name that torch's planner gives it."""
        return ".".join(map(str, self.path))

    @property
    def bytes(self) -> int:
        """Bytes of the block."""
        return math.prod(self.lengths) * _dtype(self.dtype).itemsize if self.dtype else 0

    @property
    def block(self) -> tuple[torch.dtype, torch.Size]:
        """Dtype and shape of the block."""
        return _dtype(self.dtype), torch.Size(self.lengths)

    def __str__(self) -> str:
        return f"a {self.dtype} tensor of shape {self.size}" if self.dtype else "no tensor"


# None for a tensor without a block on this rank.
HeldValues = list[HeldValue | None]

# Name, offsets and lengths.
_Block = tuple[str, tuple[int, ...], tuple[int, ...]]


def held_values(state: FlattenedState, rank: int) -> HeldValues:
    """The blocks of all values that `rank` holds, in the order of the state.

    Raises:
        InvalidInputError: the local tensor of a DTensor does not match its placements, or is no single block.
    """
    held: HeldValues = []
    blocks: dict[Any, tuple[tuple[int, ...], tuple[int, ...]] | None] = {}
    for (name, value), path in zip(state, state.form.paths.values(), strict=True):
        if not isinstance(value, torch.Tensor):
            held.append(HeldValue(path))
            continue
        size = tuple(value.shape)
        block: tuple[tuple[int, ...], tuple[int, ...]] | None = (0,) * len(size), size
        if isinstance(value, DTensor) and value.numel() > 0:
            key = id(value.device_mesh), value.placements, value.shape, local_of(value).shape
            if key not in blocks:
                blocks[key] = _block_of(name, value, rank)
            block = blocks[key]
        dtype = str(value.dtype).removeprefix("torch.")
        held.append(None if block is None else HeldValue(path, dtype, size, *block))
    return held


def _block_of(name: str, tensor: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and lengths of the block of a DTensor that `rank` holds; None where it holds nothing."""
    check_placement(name, tensor, rank)
    own = next((share for share in shares_for(tensor, rank) if share.rank == rank), None)
    if own is None:
        return None
    if any(len(runs) > 1 for runs in own.runs):
        raise InvalidInputError(
            f"{name!r} is a DTensor placed {tensor.placements}, of which rank {rank} holds no single block: DCP cannot "
            "describe that; give dimensions that the ranks divide, or redistribute it"
        )
    return tuple(runs[0][0] for runs in own.runs), own.shape


def assign(held: Sequence[HeldValues], ranks: Sequence[int]) -> list[list[int]]:
    """For each rank the indices of the values that it saves, ascending.

    Blocks that several ranks hold are assigned the largest first, each to the holder with the fewest bytes. The lowest
    holder saves an object.

    Args:
        held: of each rank, in the order of `ranks`.
        ranks: global ranks, for messages.

    Raises:
        InvalidInputError: two ranks hold different things under one name, or the ranks do not hold a whole tensor.
    """
    first: dict[str, tuple[HeldValue, int]] = {}
    # Of each distinct block its bytes, and the index of each holder with that of the value there.
    blocks: dict[_Block, tuple[int, list[tuple[int, int]]]] = {}
    for index, values in enumerate(held):
        for number, value in enumerate(values):
            if value is None:
                continue
            name = value.name
            known, other = first.setdefault(name, (value, index))
            if (known.dtype, known.size) != (value.dtype, value.size):
                raise InvalidInputError(
                    f"{name!r} is {known} on rank {ranks[other]} and {value} on rank {ranks[index]}: give different "
                    "things different names"
                )
            block = name, value.offsets, value.lengths
            blocks.setdefault(block, (value.bytes, []))[1].append((index, number))
    _check_covered(first, blocks)
    owned: list[list[int]] = [[] for _ in held]
    loads = [0] * len(held)
    for block, (size, holders) in sorted(blocks.items(), key=lambda item: (-item[1][0], item[0])):
        if first[block[0]][0].dtype:
            index, number = min(holders, key=lambda holder: loads[holder[0]])
            # Empty blocks count too, or one rank would get all of them.
            loads[index] += max(size, 1)
        else:
            index, number = holders[0]
        owned[index].append(number)
    return [sorted(numbers) for numbers in owned]


def _check_covered(first: Mapping[str, tuple[HeldValue, int]], blocks: Iterable[_Block]) -> None:
    elements: collections.Counter[str] = collections.Counter()
    for name, _, lengths in blocks:
        elements[name] += math.prod(lengths)
    for name, (value, _) in first.items():
        if value.dtype and elements[name] != math.prod(value.size):
            raise InvalidInputError(
                f"{name!r} has {math.prod(value.size)} elements, and its blocks on the ranks that save have "
                f"{elements[name]}: save it with a group of all ranks that hold a block, each another one or the same"
            )


@functools.cache
def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
