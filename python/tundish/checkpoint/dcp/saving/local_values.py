"""The values that a rank holds, and which rank saves a value that several hold.

Invariants:
    - Exactly one holder saves each block of a tensor and each object.
    - The blocks that are saved make up each tensor.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from tundish.checkpoint.dcp.flattened_state import FlattenedState
from tundish.checkpoint.placements import check_placement, rank_parts_of
from tundish.checkpoint.tensors import local_of
from tundish.errors import InvalidInputError

__all__ = ["LocalValue", "LocalValues", "assign_values", "local_values_of", "shape_of"]


class LocalValue(NamedTuple):
    """A value as one rank holds it. Shapes are text, such as "24,12", because there may be millions of values.

    Attributes:
        name: as torch's planner names it.
        path: JSON list of the keys that lead to it in the state dict.
        dtype: such as "float32"; empty for a value that is no tensor.
        size: shape of the whole tensor.
        offsets, lengths: the block of it that the rank holds.
    """

    name: str
    path: str
    dtype: str = ""
    size: str = ""
    offsets: str = ""
    lengths: str = ""

    @property
    def block(self) -> tuple[torch.dtype, torch.Size]:
        """Dtype and shape of the block."""
        return _dtype(self.dtype), shape_of(self.lengths)

    def __str__(self) -> str:
        return f"a {self.dtype} tensor of shape {tuple(shape_of(self.size))}" if self.dtype else "no tensor"


# None for a tensor without a block on this rank.
LocalValues = list[LocalValue | None]

# Name, offsets and lengths.
_Block = tuple[str, str, str]


@functools.lru_cache(maxsize=4096)
def shape_of(text: str) -> torch.Size:
    """The shape of its text."""
    return torch.Size(map(int, text.split(","))) if text else torch.Size()


def local_values_of(state: FlattenedState, rank: int) -> LocalValues:
    """The blocks of all values that `rank` holds, in the order of the state.

    Raises:
        InvalidInputError: the local tensor of a DTensor does not match its placements, or is no single block.
    """
    values: LocalValues = []
    blocks: dict[Any, tuple[str, str] | None] = {}
    for (name, value), keys in zip(state, state.structure.paths.values(), strict=True):
        path = json.dumps(keys)
        if not isinstance(value, torch.Tensor):
            values.append(LocalValue(name, path))
            continue
        size = _text(value.shape)
        block: tuple[str, str] | None = _text([0] * value.dim()), size
        if isinstance(value, DTensor) and value.numel() > 0:
            key = id(value.device_mesh), value.placements, value.shape, local_of(value).shape
            if key not in blocks:
                blocks[key] = _block_of(name, value, rank)
            block = blocks[key]
        dtype = str(value.dtype).removeprefix("torch.")
        values.append(None if block is None else LocalValue(name, path, dtype, size, *block))
    return values


def _text(shape: Iterable[int]) -> str:
    return ",".join(map(str, shape))


def _block_of(name: str, tensor: Any, rank: int) -> tuple[str, str] | None:
    """Offsets and lengths of the block of a DTensor that `rank` holds; None where it holds nothing."""
    check_placement(name, tensor, rank)
    own = next((rank_part for rank_part in rank_parts_of(tensor, rank) if rank_part.rank == rank), None)
    if own is None:
        return None
    if any(len(runs) > 1 for runs in own.runs):
        raise InvalidInputError(
            f"{name!r} is a DTensor placed {tensor.placements}, and rank {rank} holds several blocks of it, which DCP "
            "cannot describe: give dimensions that the ranks divide, or redistribute it"
        )
    return _text(runs[0][0] for runs in own.runs), _text(own.shape)


def assign_values(values_by_rank: Sequence[LocalValues], ranks: Sequence[int]) -> tuple[list[list[int]], int]:
    """Decide which rank saves which values.

    Blocks that several ranks hold are assigned the largest first, each to the holder with the fewest bytes. The lowest
    holder saves an object.

    Args:
        values_by_rank: in the order of `ranks`.
        ranks: global ranks, for messages.

    Returns:
        For each rank the indices of the values that it saves, ascending; and the bytes of all blocks together.

    Raises:
        InvalidInputError: two ranks hold different things under one name, or the ranks do not hold a whole tensor.
    """
    first: dict[str, tuple[LocalValue, int]] = {}
    # Of each distinct block, the index of each holder with that of the value there.
    blocks: dict[_Block, list[tuple[int, int]]] = {}
    for index, values in enumerate(values_by_rank):
        for number, value in enumerate(values):
            if value is None:
                continue
            name, _, dtype, size, offsets, lengths = value
            known, other = first.setdefault(name, (value, index))
            if known.dtype != dtype or known.size != size:
                raise InvalidInputError(
                    f"{name!r} is {known} on rank {ranks[other]} and {value} on rank {ranks[index]}: give different "
                    "things different names"
                )
            blocks.setdefault((name, offsets, lengths), []).append((index, number))
    _check_covered(first, blocks)
    owned: list[list[int]] = [[] for _ in values_by_rank]
    loads = [0] * len(values_by_rank)
    total, shared = 0, []
    for block, holders in blocks.items():
        index, number = holders[0]
        value = first[block[0]][0]
        size_bytes = shape_of(block[2]).numel() * _dtype(value.dtype).itemsize if value.dtype else 0
        total += size_bytes
        if len(holders) > 1 and value.dtype:
            shared.append((-size_bytes, block, holders))
        else:
            owned[index].append(number)
            loads[index] += size_bytes
    for minus_size, _, holders in sorted(shared):
        index, number = min(holders, key=lambda holder: loads[holder[0]])
        owned[index].append(number)
        # Empty blocks count too, or one rank would get all of them.
        loads[index] += max(-minus_size, 1)
    return [sorted(numbers) for numbers in owned], total


def _check_covered(first: Mapping[str, tuple[LocalValue, int]], blocks: Iterable[_Block]) -> None:
    elements: collections.Counter[str] = collections.Counter()
    for name, _, lengths in blocks:
        elements[name] += shape_of(lengths).numel()
    for name, (value, _) in first.items():
        whole = shape_of(value.size).numel()
        if value.dtype and elements[name] != whole:
            raise InvalidInputError(
                f"{name!r} has {whole} elements, and its blocks on the ranks that save have {elements[name]}: give "
                "the Checkpointer a group with all ranks that hold blocks of it"
            )


@functools.cache
def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
