"""Decides with the other ranks which of them saves a value that several hold.

Every rank sends the list of its values to the first one, which assigns each part to one holder. This happens once for
each form of the state dict; saves of a known form exchange nothing.

Invariants:
    - Exactly one holder saves each part of a tensor and each object.
    - A form counts as known only after all ranks planned it together. One rank with a new form makes all plan again.
"""

from __future__ import annotations

import base64
import collections
import functools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from tundish.checkpoint.dcp.file_layout import FileLayout
from tundish.checkpoint.dcp.flattened_state import FlattenedState, Form
from tundish.checkpoint.placements import check_placement, shares_for
from tundish.checkpoint.tensors import local_of
from tundish.distributed import Voter
from tundish.errors import InvalidInputError

__all__ = ["HeldValue", "OwnedPart", "RankFiles", "SavePlanner", "assign", "held_values"]

# About the bytes that an item takes in a file beside those of its tensor.
_ITEM_BYTES = 2048


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


# None for a tensor of which the rank holds nothing.
HeldValues = list[HeldValue | None]

# Name, offsets and lengths.
_Block = tuple[str, tuple[int, ...], tuple[int, ...]]


def held_values(state: FlattenedState, rank: int) -> HeldValues:
    """What `rank` holds of each value.

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


class RankFiles:
    """What every rank saves, as the first rank keeps it. Packed: ten thousand ranks may have millions of items."""

    def __init__(self, texts: Sequence[str], owned: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._owned = owned

    def __iter__(self) -> Iterator[tuple[HeldValues, Sequence[int]]]:
        """Of each rank the values that it holds, and the indices of those that it saves."""
        return zip(_unpack_all(self._texts), self._owned, strict=True)

    def total_bytes(self) -> int:
        """About the bytes of all files together."""
        parts = (OwnedPart(held, numbers) for held, numbers in self)
        return sum(
            value.bytes + _ITEM_BYTES for part in parts for value in part.values(part.tensors + part.objects)
        )


class OwnedPart:
    """What one rank saves of the values that it holds.

    Attributes:
        held: what it holds.
        tensors, objects: indices of the values that it saves.
        form: of the state dict.
        files: on the first rank, what every rank saves.
        total_bytes: on the first rank, about the bytes of all files together.
        layout: of the last save.
        metadata: on the first rank, the notes of all ranks at the last save and the `.metadata` that follows from them.
    """

    def __init__(
        self, held: HeldValues, owned: Sequence[int], form: Form | None = None, files: RankFiles | None = None
    ) -> None:
        self.held = held
        saved = [(number, value) for number in owned if (value := held[number]) is not None]
        self.tensors = [number for number, value in saved if value.dtype]
        self.objects = [number for number, value in saved if not value.dtype]
        self.form = form
        self.files = files
        self.total_bytes = 0 if files is None else files.total_bytes()
        self.layout: FileLayout | None = None
        self.metadata: tuple[Sequence[str], bytes] | None = None

    def values(self, numbers: Sequence[int]) -> list[HeldValue]:
        """The values of these indices."""
        return [value for number in numbers if (value := self.held[number]) is not None]


class SavePlanner:
    """The ranks that save together; remembers what this rank saves of the last form.

    Args:
        voter: of the callers' threads.
        timeout: seconds to wait for other ranks.
    """

    def __init__(self, voter: Voter, timeout: float) -> None:
        self.rank = voter.rank
        self.index = voter.ranks.index(voter.rank)
        self._voter = voter
        self._timeout = timeout
        self._part: OwnedPart | None = None

    @property
    def known_form(self) -> Form | None:
        """The form of the last state dict, which was checked."""
        return None if self._part is None else self._part.form

    def known_part(self, state: FlattenedState) -> OwnedPart | None:
        """What this rank saves of `state`; None where its form is new."""
        return self._part if self._part is not None and self._part.form is state.form else None

    def plan(self, state: FlattenedState, held: HeldValues) -> OwnedPart:
        """Collective: agree on what this rank saves of `state`, of which it holds `held`.

        Raises:
            InvalidInputError: as `assign`.
        """
        voter, what = self._voter, "planning what each rank saves"
        texts = voter.gather(_pack(held), what=what, timeout=self._timeout)
        owned: list[list[int]] = []
        error: BaseException | None = None
        try:
            if texts:
                owned = assign(_unpack_all(texts), voter.ranks)
        except Exception as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        reply = voter.broadcast(
            _pack(owned) if texts else None, error, source=voter.ranks[0], what=what, timeout=self._timeout
        )
        files = RankFiles(texts, owned) if texts else None
        self._part = OwnedPart(held, _unpack(reply)[self.index], state.form, files)
        return self._part


def _pack(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()


def _unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _unpack_all(texts: Sequence[str]) -> list[HeldValues]:
    # Many ranks send the same text.
    known: dict[str, HeldValues] = {}
    for text in texts:
        if text not in known:
            known[text] = [
                None if value is None else HeldValue(tuple(value[0]), value[1], *map(tuple, value[2:]))
                for value in _unpack(text)
            ]
    return [known[text] for text in texts]


@functools.cache
def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
