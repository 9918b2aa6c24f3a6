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

from tundish.checkpoint.buffers import PAGE
from tundish.checkpoint.tensors import DTYPES, TensorSpec
from tundish.checkpoint.write_plan import Place
from tundish.errors import InvalidInputError

INDEX_NAME = "model.safetensors.index.json"
# Readers of the format refuse longer headers.
_MOST_HEADER_BYTES = 100_000_000

_ORDER = {dtype: place for place, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """A file: the header, then the tensors without gaps.

    Attributes:
        name: in the checkpoint.
        size: bytes.
        header: the first bytes.
        products: the number of each product in the file, in the order of their places.
        places: where each product lies.
    """

    name: str
    size: int
    header: bytes
    products: tuple[int, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """All files with weights. `index`: None if there is one file. `fingerprint`: equal for equal layouts."""

    files: tuple[ShardFile, ...]
    index: bytes | None
    fingerprint: str


def lay_out(
    products: tuple[TensorSpec, ...],
    blocks: tuple[int, ...],
    shard_bytes: int,
    metadata: tuple[tuple[str, str], ...],
    total_parameters: int | None = None,
    named: tuple[tuple[str, int], ...] = (),
) -> WeightFiles:
    """Lay products out in files.

    Args:
        products: in the order in which files are filled.
        blocks: products with the same number share a file.
        shard_bytes: most bytes of tensors in a file, unless a block alone has more.
        metadata: of every file's header.
        total_parameters: for the index; None leaves it out.
        named: names of files and how many products each has, in place of shards; such files have no index.

    Raises `InvalidInputError` for a header that readers would refuse.
    """
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in products]
    if named:
        numbers = iter(range(len(products)))
        shards = [(name, list(itertools.islice(numbers, count))) for name, count in named]
    else:
        shards = _named_shards(_split(sizes, blocks, shard_bytes))
    files = tuple(
        _file(name, [(number, products[number], sizes[number]) for number in shard], metadata)
        for name, shard in shards
    )
    index = None
    if len(files) > 1 and not named:
        weight_map = {products[number][0]: name for name, shard in shards for number in shard}
        index = _index(weight_map, sum(sizes), total_parameters)
    digest = hashlib.sha256(index or b"")
    for file in files:
        digest.update(file.name.encode() + file.header)
    return WeightFiles(files=files, index=index, fingerprint=digest.hexdigest())


def assign_files(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
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


def _named_shards(shards: Sequence[list[int]]) -> list[tuple[str, list[int]]]:
    count = len(shards)
    if count == 1:
        return [("model.safetensors", shards[0])]
    return [
        (f"model-{number:05d}-of-{count:05d}.safetensors", shard) for number, shard in enumerate(shards, 1)
    ]


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
    name: str, tensors: Sequence[tuple[int, TensorSpec, int]], metadata: tuple[tuple[str, str], ...]
) -> ShardFile:
    described: dict[str, object] = {"__metadata__": dict(sorted(metadata))}
    ordered = sorted(tensors, key=lambda one: (_ORDER[one[1][2]], one[1][0]))
    at = 0
    for _, (tensor, shape, dtype), size in ordered:
        described[tensor] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    length = -(-(len(text) + 8) // PAGE) * PAGE
    if length - 8 > _MOST_HEADER_BYTES:
        raise InvalidInputError(
            f"the names of {len(tensors)} tensors in {name} take {len(text)} bytes, and readers of safetensors take "
            f"{_MOST_HEADER_BYTES}: give a smaller shard_bytes"
        )
    places = []
    at = length
    for _, (_, shape, dtype), size in ordered:
        places.append(Place(at, at + size, dtype, tuple(shape)))
        at += size
    return ShardFile(
        name=name,
        size=at,
        header=(length - 8).to_bytes(8, "little") + text.ljust(length - 8),
        products=tuple([number for number, _, _ in ordered]),
        places=tuple(places),
    )


def _index(weight_map: dict[str, str], total_size: int, total_parameters: int | None) -> bytes:
    metadata = {"total_size": total_size}
    if total_parameters is not None:
        metadata["total_parameters"] = total_parameters
    index = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
