"""Lays tensors out in safetensors files, and assigns the files to ranks.

Files follow from names, shapes and dtypes alone, so any number of ranks writes the same bytes. A header fills whole
pages, so that files can be written past the page cache; tensors follow without gaps, aligned to their dtypes. The split
into shards is that of `huggingface_hub.split_torch_state_dict_into_shards`; headers follow the safetensors format.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tundish.checkpoint.staging.buffers import PAGE, Buffer, Place, Places
from tundish.checkpoint.tensors import DTYPES, Facts
from tundish.errors import InvalidInputError

__all__ = [
    "INDEX_NAME",
    "Entry",
    "Layout",
    "ShardBuffer",
    "ShardFile",
    "assign",
    "lay_out",
    "lay_out_as_named",
]

INDEX_NAME = "model.safetensors.index.json"
# Readers of the format refuse more.
_MOST_HEADER_BYTES = 100_000_000

_ORDER = {dtype: place for place, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor in a file: bytes `start` to `stop` - 1 hold the product of this number."""

    product: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """A file: the header, then the entries, in order and without gaps. `places`: of the entries."""

    name: str
    size: int
    header: bytes
    entries: tuple[Entry, ...]
    places: Places


class ShardBuffer(Buffer):
    """Host memory for a whole file, with its header."""

    def __init__(self, file: ShardFile, *, is_pinned: bool = False) -> None:
        super().__init__(file.size, is_pinned=is_pinned)
        self.file = file
        memoryview(self.image)[: len(file.header)] = file.header


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All files with weights. `index`: None where there is one file. `fingerprint`: equal for equal layouts."""

    files: tuple[ShardFile, ...]
    index: bytes | None
    fingerprint: str


def lay_out(
    products: tuple[Facts, ...],
    blocks: tuple[int, ...],
    shard_bytes: int,
    metadata: tuple[tuple[str, str], ...],
    total_parameters: int | None,
) -> Layout:
    """Lay products out in files.

    Args:
        products: in the order in which files are filled.
        blocks: products of one number share a file.
        shard_bytes: a file holds no more bytes of tensors, unless a block alone has more.
        metadata: of every file's header.
        total_parameters: for the index; None leaves it out.

    Raises `InvalidInputError` for a header that readers would refuse.
    """
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in products]
    shards = _split(sizes, blocks, shard_bytes)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    files = tuple(
        _file(name, [(number, products[number], sizes[number]) for number in shard], metadata)
        for name, shard in zip(names, shards, strict=True)
    )
    index = None
    if len(files) > 1:
        index = _index(
            {
                products[number][0]: name
                for name, shard in zip(names, shards, strict=True)
                for number in shard
            },
            sum(sizes),
            total_parameters,
        )
    digest = hashlib.sha256(index or b"")
    for file in files:
        digest.update(file.header)
    return Layout(files=files, index=index, fingerprint=digest.hexdigest())


def lay_out_as_named(
    products: tuple[Facts, ...], files: tuple[tuple[str, int], ...], metadata: tuple[tuple[str, str], ...]
) -> Layout:
    """Lay products out in files with given names and contents.

    Args:
        products: those of the first file, then those of the next; names are distinct within a file.
        files: the name of each, and how many products it holds.
        metadata: of every file's header.

    Raises `InvalidInputError` for a header that readers would refuse.
    """
    numbered = enumerate(products)
    laid: list[ShardFile] = []
    digest = hashlib.sha256()
    for name, count in files:
        own = [
            (number, product, math.prod(product[1]) * product[2].itemsize)
            for number, product in itertools.islice(numbered, count)
        ]
        laid.append(_file(name, own, metadata))
        digest.update(name.encode() + laid[-1].header)
    return Layout(files=tuple(laid), index=None, fingerprint=digest.hexdigest())


def assign(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Assign files to ranks by Graham's LPT rule (SIAM J. Appl. Math. 17, 1969).

    The largest file goes first, to the rank with the fewest bytes so far, in the order of `ranks`.

    Args:
        sizes: bytes of each file.
        ranks: the ranks that write.

    Returns:
        The rank that writes each file.
    """
    loads = [(0, place, rank) for place, rank in enumerate(ranks)]
    writers = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        load, place, rank = loads[0]
        writers[number] = rank
        heapq.heapreplace(loads, (load + sizes[number], place, rank))
    return writers


def _split(sizes: Sequence[int], blocks: Sequence[int], shard_bytes: int) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        members.setdefault(block, []).append(number)
    shards: list[list[int]] = []
    filling: list[int] = []
    filled = 0
    for numbers in members.values():
        size = sum(sizes[number] for number in numbers)
        if size > shard_bytes:
            shards.append(numbers)
            continue
        if filled + size > shard_bytes:
            shards.append(filling)
            filling, filled = [], 0
        filling += numbers
        filled += size
    if filling:
        shards.append(filling)
    return shards


def _file(
    name: str, tensors: Sequence[tuple[int, Facts, int]], metadata: tuple[tuple[str, str], ...]
) -> ShardFile:
    described: dict[str, object] = {"__metadata__": dict(sorted(metadata))}
    spans: list[tuple[int, Place]] = []
    at = 0
    for number, (tensor, shape, dtype), size in sorted(
        tensors, key=lambda one: (_ORDER[one[1][2]], one[1][0])
    ):
        described[tensor] = {
            "dtype": DTYPES[dtype],
            "shape": _shape_in_file(tensor, shape, dtype),
            "data_offsets": [at, at + size],
        }
        spans.append((number, Place(at, at + size, dtype, tuple(shape))))
        at += size
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    length = -(-(len(text) + 8) // PAGE) * PAGE
    if length - 8 > _MOST_HEADER_BYTES:
        raise InvalidInputError(
            f"the names of {len(tensors)} tensors in {name} take {len(text)} bytes, and readers of safetensors take "
            f"{_MOST_HEADER_BYTES}: give a smaller shard_bytes"
        )
    return ShardFile(
        name=name,
        size=length + at,
        header=(length - 8).to_bytes(8, "little") + text.ljust(length - 8),
        entries=tuple(
            [
                Entry(product=number, start=length + place.start, stop=length + place.stop)
                for number, place in spans
            ]
        ),
        places=Places(
            [place._replace(start=length + place.start, stop=length + place.stop) for _, place in spans]
        ),
    )


def _shape_in_file(name: str, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
    if DTYPES[dtype] != "F4":
        return list(shape)
    # torch counts pairs of these, files count values.
    if not shape:
        raise InvalidInputError(
            f"{name!r} has no dimension and a dtype that packs two values: reshape it to (1,)"
        )
    return [*shape[:-1], shape[-1] * 2]


def _index(weight_map: dict[str, str], total_size: int, total_parameters: int | None) -> bytes:
    metadata = {"total_size": total_size}
    if total_parameters is not None:
        metadata["total_parameters"] = total_parameters
    index = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
