"""Reads tensors of a DCP checkpoint directly into their target memory.

torch's reader makes a tensor of each item and copies from it. This one reads items in the torch record format to their
target, or, where that is not possible, reads the requested rows and copies them. It leaves all other items to torch.

Invariant: an item is read here only if every byte around the tensor is what `torch.save` writes, so that torch's reader
gives the same values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tundish.checkpoint.dcp.format import METADATA, record_frame_of
from tundish.checkpoint.dcp.unpickling import read_metadata
from tundish.checkpoint.root import Published
from tundish.tensor_bytes import raw_bytes

# Bytes read between two checks for Ctrl-C.
_PIECE = 32 << 20


class _StoredTensor(NamedTuple):
    """A tensor in a file; `start` is the offset of its first byte."""

    dtype: torch.dtype
    shape: torch.Size
    start: int


class _PublishedFiles(FileSystem):
    """Files of a published folder, for the items that are left to torch."""

    def __init__(self, published: Published) -> None:
        self._published = published

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:  # noqa: ARG002 (torch's)
        file = Path(path).relative_to(self._published.path).as_posix()
        with self._published.open(file) as stream:
            yield stream


class TensorReader(FileSystemReader):
    """torch's `FileSystemReader` of a published folder, with fewer copies."""

    def __init__(self, published: Published) -> None:
        super().__init__(published.path)
        self.fs = _PublishedFiles(published)
        self._published = published

    def read_metadata(self, *args: object, **kwargs: object) -> Any:  # noqa: ARG002 (as torch calls it)
        """The contents of `.metadata`; a damaged one raises anything."""
        with self._published.open(METADATA) as file:
            return read_metadata(file)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._about = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        left = []
        for name, items in by_file.items():
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            with self._published.open(name) as file:
                left += [item for item in items if not self._read(file, item, planner)]
        return super().read_data(dataclasses.replace(plan, items=left), planner)

    def _read(self, file: BinaryIO, item: ReadItem, planner: LoadPlanner) -> bool:
        """Load an item; returns False to leave it to torch's reader."""
        stored = self._stored(file, item)
        if stored is None:
            return False
        target = planner.resolve_tensor(item).detach()
        if type(target) is not torch.Tensor or target.size() != torch.Size(item.lengths):
            return False
        # Rows are contiguous, so only the requested ones are read. A scalar is one row.
        rows = torch.Size((*item.lengths[:1], *stored.shape[1:]))
        row_bytes = stored.shape[1:].numel() * stored.dtype.itemsize
        first = item.storage_offsets[0] if stored.shape else 0
        is_direct = target.size() == rows and _is_plain(target, stored.dtype)
        values = target if is_direct else torch.empty(rows, dtype=stored.dtype, device="cpu")
        if not _fill(values, file, stored.start + first * row_bytes):
            return False
        if is_direct:
            # As any write does, so that autograd notices that a tensor saved for backward changed.
            torch.autograd.graph.increment_version(target)
        else:
            for dimension in range(1, len(rows)):
                values = values.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
            target.copy_(values)
        planner.commit_tensor(item, target)
        return True

    def are_equal(self, one: Any, other: Any) -> bool:
        """Whether two places of the checkpoint hold the same bytes."""
        if one.length != other.length:
            return False
        with (
            self._published.open(one.relative_path) as file,
            self._published.open(other.relative_path) as second,
        ):
            file.seek(one.offset)
            second.seek(other.offset)
            for start in range(0, one.length, _PIECE):
                size = min(_PIECE, one.length - start)
                if file.read(size) != second.read(size):
                    return False
        return True

    def _stored(self, file: BinaryIO, item: ReadItem) -> _StoredTensor | None:
        """The tensor of an item, if the item has the torch record format."""
        about = self._about.get(item.storage_index.fqn)
        place = self.storage_data[item.storage_index]
        if not isinstance(about, TensorStorageMetadata) or item.type is not LoadItemType.TENSOR:
            return None
        # Older versions of torch have no such field.
        if getattr(place, "transform_descriptors", None):
            return None
        shape = _shape_of(about.chunks, item.storage_index)
        if shape is None:
            return None
        dtype = about.properties.dtype
        frame, size = record_frame_of(dtype, shape), shape.numel() * dtype.itemsize
        if place.length != len(frame.head) + size + len(frame.tail):
            return None
        start = place.offset + len(frame.head)
        for expected, position in ((frame.head, place.offset), (frame.tail, start + size)):
            file.seek(position)
            if file.read(len(expected)) != expected:
                return None
        return _StoredTensor(dtype, shape, start)


def _shape_of(chunks: list[ChunkStorageMetadata], index: MetadataIndex) -> torch.Size | None:
    """The shape of the chunk that `index` refers to."""
    # Mostly the index says which one it is.
    if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
        return chunks[index.index].sizes
    return next((chunk.sizes for chunk in chunks if chunk.offsets == index.offset), None)


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of a tensor is exactly its values, in C order."""
    return (
        tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _fill(tensor: torch.Tensor, file: BinaryIO, start: int) -> bool:
    """Read the values of a plain tensor; returns False if the file or the memory is too short."""
    if not tensor.numel():
        return True
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if tensor.untyped_storage().nbytes() < end:
        # Elements smaller than a byte, or freed memory.
        return False
    # numpy's annotations do not say that an array has a buffer.
    values: Any = raw_bytes(tensor).numpy()
    memory = memoryview(values)
    file.seek(start)
    while memory:
        count = file.readinto(memory[:_PIECE])  # type: ignore[attr-defined]
        if not count:
            return False
        memory = memory[count:]
    return True
