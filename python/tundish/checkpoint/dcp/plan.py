"""Plans a DCP save with the other ranks, once for each structure of the state dict.

Every rank sends the list of its values to the first one, which assigns each block to one holder. Saves of a known
structure exchange nothing.

Invariants:
    - A structure counts as known only after all ranks planned it together. If it is new to one rank, all plan again.
    - Exactly one holder saves each block of a tensor and each object.
    - The blocks that are saved make up each tensor.
"""

from __future__ import annotations

import base64
import collections
import functools
import json
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from tundish.checkpoint.dcp.format import FileLayout, shard_name
from tundish.checkpoint.dcp.state import FlattenedState, StateStructure
from tundish.checkpoint.placements import check_placement, rank_parts_of
from tundish.checkpoint.replicas import BUFFER, contents_of, differs, say_once
from tundish.checkpoint.tensors import local_of
from tundish.distributed import Voter
from tundish.errors import InvalidInputError


class LocalValue(NamedTuple):
    """A value as one rank holds it. Shapes are text, such as "24,12", because there may be millions of values.

    Attributes:
        name: as torch's planner names it.
        path: JSON list of the keys that lead to it in the state dict.
        dtype: such as "float32"; empty for a value that is no tensor.
        size: shape of the whole tensor.
        offsets, lengths: the block of it that the rank holds.
        content: as `contents_of` compares it; empty if it is not compared.
    """

    name: str
    path: str
    dtype: str = ""
    size: str = ""
    offsets: str = ""
    lengths: str = ""
    content: str = ""

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
    for (name, value), keys in zip(state, state.structure.torch_paths, strict=True):
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


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which rank saves which values, on the first rank.

    Attributes:
        owned: for each rank the indices of the values that it saves, ascending.
        shared: for each rank the indices of the values that are compared with those of other ranks, by a name for the
            ranks that hold them.
        total_bytes: of all blocks together.
        differing: the names of buffers that differ between ranks.
    """

    owned: Sequence[Sequence[int]]
    shared: Sequence[Mapping[str, Sequence[int]]]
    total_bytes: int
    differing: Sequence[str]


def assign_values(values_by_rank: Sequence[LocalValues], ranks: Sequence[int]) -> Assignment:
    """Decide which rank saves which values.

    Blocks that several ranks hold are assigned the largest first, each to the holder with the fewest bytes. The lowest
    holder saves an object, and a buffer of a module.

    Args:
        values_by_rank: in the order of `ranks`.
        ranks: global ranks, for messages.

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
            known, other = first.setdefault(value.name, (value, index))
            if known.dtype != value.dtype or known.size != value.size:
                raise InvalidInputError(
                    f"{value.name!r} is {known} on rank {ranks[other]} and {value} on rank {ranks[index]}: give "
                    "different things different names"
                )
            blocks.setdefault((value.name, value.offsets, value.lengths), []).append((index, number))
    _check_covered(first, blocks)
    owned: list[list[int]] = [[] for _ in values_by_rank]
    shared: list[dict[str, list[int]]] = [{} for _ in values_by_rank]
    groups: dict[tuple[int, ...], str] = {}
    loads = [0] * len(values_by_rank)
    total, spread, differing = 0, [], []
    for block, holders in blocks.items():
        index, number = holders[0]
        value = first[block[0]][0]
        size_bytes = shape_of(block[2]).numel() * _dtype(value.dtype).itemsize if value.dtype else 0
        total += size_bytes
        is_buffer = False
        if len(holders) > 1:
            contents = [(ranks[at], _content(values_by_rank[at][place])) for at, place in holders]
            contents = [(rank, content) for rank, content in contents if content]
            if contents and differs(block[0], contents):
                differing.append(block[0])
            is_buffer = any(content.startswith(BUFFER) for _, content in contents)
            if contents and not is_buffer:
                group = groups.setdefault(tuple(at for at, _ in holders), str(len(groups)))
                for at, place in holders:
                    shared[at].setdefault(group, []).append(place)
        if len(holders) > 1 and value.dtype and not is_buffer:
            spread.append((-size_bytes, block, holders))
        else:
            owned[index].append(number)
            loads[index] += size_bytes
    for minus_size, _, holders in sorted(spread):
        index, number = min(holders, key=lambda holder: loads[holder[0]])
        owned[index].append(number)
        # Empty blocks count too, or one rank would get all of them.
        loads[index] += max(-minus_size, 1)
    return Assignment(
        owned=[sorted(numbers) for numbers in owned], shared=shared, total_bytes=total, differing=differing
    )


def _content(value: LocalValue | None) -> str:
    return "" if value is None else value.content


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


# About the bytes that an item takes in a file beside those of its tensor.
_ITEM_BYTES = 2048


class FilesByRank:
    """The files of all ranks, kept on the first one. Packed: ten thousand ranks may have millions of items.

    Attributes:
        total_bytes: about the bytes of all files together.
    """

    def __init__(self, texts: Sequence[str], owned: Sequence[Sequence[int]], total_bytes: int) -> None:
        self._texts = texts
        self._owned = owned
        self.total_bytes = total_bytes + _ITEM_BYTES * sum(map(len, owned))

    def __iter__(self) -> Iterator[tuple[LocalValues, Sequence[int]]]:
        """Of each rank the values that it holds, and the indices of those that it saves."""
        return zip(map(_unpack_values, self._texts), self._owned, strict=True)


class RankShare:
    """The values that one rank saves.

    Attributes:
        local_values: the values that the rank holds.
        tensors, objects: indices of the values that it saves.
        structure: of the state dict.
        files: on the first rank, the files of all ranks.
        shared: indices of the values that are compared with those of other ranks, by a name for these ranks.
        layout: of the last save.
        metadata: on the first rank, the notes of all ranks at the last save and the `.metadata` that follows from them.
    """

    def __init__(
        self,
        local_values: LocalValues,
        owned: Sequence[int],
        structure: StateStructure | None = None,
        files: FilesByRank | None = None,
        shared: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.local_values = local_values
        self.shared = shared or {}
        saved = [(number, value) for number in owned if (value := local_values[number]) is not None]
        self.tensors = [number for number, value in saved if value.dtype]
        self.objects = [number for number, value in saved if not value.dtype]
        self.structure = structure
        self.files = files
        self.layout: FileLayout | None = None
        self.metadata: tuple[Sequence[str], bytes] | None = None

    def values(self, numbers: Sequence[int]) -> list[LocalValue]:
        """The values of these indices."""
        return [value for number in numbers if (value := self.local_values[number]) is not None]


class SavePlanner:
    """The ranks that save together; remembers this rank's part of the last structure.

    Args:
        voter: of the callers' threads.
    """

    def __init__(self, voter: Voter) -> None:
        self.rank = voter.rank
        self.index = voter.index
        self._voter = voter
        self._part: RankShare | None = None

    @property
    def known_structure(self) -> StateStructure | None:
        """The structure of the last state dict, which was checked."""
        return None if self._part is None else self._part.structure

    def known_part(self, state: FlattenedState) -> RankShare | None:
        """This rank's part of `state`; None if its structure is new."""
        return self._part if self._part is not None and self._part.structure is state.structure else None

    def plan(self, state: FlattenedState, local_values: LocalValues) -> RankShare:
        """Collective: find this rank's part of `state`; the rank holds `local_values`. Fails on all ranks or on none.

        Raises:
            InvalidInputError: as `assign_values`.
        """
        voter, what = self._voter, "planning what each rank saves"
        text, error = "", None
        try:
            text = _pack_values(self._with_contents(state, local_values))
        except Exception as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        texts = voter.gather(text, error, what=what)
        files, reply = None, None
        try:
            if texts:
                everyone = list(map(_unpack_values, texts))
                assigned = assign_values(everyone, voter.ranks)
                files = FilesByRank(texts, assigned.owned, assigned.total_bytes)
                reply = _pack_reply(assigned, everyone)
                say_once(tuple(assigned.differing))
        except Exception as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        owned, kinds, places = _unpack(voter.broadcast(reply, error, what=what))
        numbers = owned[self.index]
        owned_here = range(len(local_values)) if numbers is None else numbers
        self._part = RankShare(local_values, owned_here, state.structure, files, kinds[places[self.index]])
        return self._part

    def _with_contents(self, state: FlattenedState, local_values: LocalValues) -> LocalValues:
        """`local_values` with what other ranks compare."""
        if len(self._voter.ranks) == 1:
            return local_values
        pairs = zip(local_values, contents_of(state.values), strict=True)
        return [None if value is None else value._replace(content=content) for value, content in pairs]


def _pack_reply(assigned: Assignment, everyone: Sequence[LocalValues]) -> str:
    """Sent to all ranks: the values that each rank saves, and those that it compares."""
    # Mostly a rank saves all that it holds, and many ranks compare the same.
    owned = [
        None if len(own) == len(held) else own for own, held in zip(assigned.owned, everyone, strict=True)
    ]
    kinds: dict[str, int] = {}
    places = [kinds.setdefault(json.dumps(shared), len(kinds)) for shared in assigned.shared]
    return _pack([owned, list(map(json.loads, kinds)), places])


def _pack(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()


def _unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _pack_values(local_values: LocalValues) -> str:
    # Names are printable text, so that no field contains a line break.
    return _pack([None if value is None else "\n".join(value) for value in local_values])


# Ranks that hold the same send the same text.
@functools.lru_cache(maxsize=8)
def _unpack_values(text: str) -> LocalValues:
    return [None if row is None else LocalValue(*row.split("\n")) for row in _unpack(text)]


def make_metadata(files: FilesByRank, object_lengths: Sequence[Sequence[int]]) -> bytes:
    """The contents of `.metadata`.

    Args:
        files: of all ranks.
        object_lengths: of every rank the lengths in bytes of the objects that it saves, in order.
    """
    about: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for index, ((values, numbers), lengths) in enumerate(zip(files, object_lengths, strict=True)):
        paths.update((value.name, tuple(json.loads(value.path))) for value in values if value is not None)
        part = RankShare(values, numbers)
        layout = FileLayout((value.block for value in part.values(part.tensors)), lengths)
        saved = part.values(part.tensors + part.objects)
        for value, (start, length) in zip(saved, layout.items(), strict=True):
            places[_describe(value, about)] = _StorageInfo(shard_name(index), start, length)
    return pickle.dumps(Metadata(about, paths, places, StorageMeta()))


def _describe(value: LocalValue, about: dict[str, Any]) -> MetadataIndex:
    """Add a value to `about`; returns the key of its place."""
    name = value.name
    if not value.dtype:
        about[name] = BytesStorageMetadata()
        return MetadataIndex(name)
    dtype, lengths = value.block
    tensor = about.setdefault(name, TensorStorageMetadata(TensorProperties(dtype), shape_of(value.size), []))
    tensor.chunks.append(ChunkStorageMetadata(shape_of(value.offsets), lengths))
    return MetadataIndex(name, shape_of(value.offsets), len(tensor.chunks) - 1)
