"""The format of one tensor in a DCP file, as `torch.save` writes it.

An item of a `.distcp` file is an uncompressed zip archive whose record `data/0` is the tensor's raw bytes. A `Frame` is
that archive without them, so that a tensor is copied once, directly to its place in the file.

Invariants: a frame depends only on dtype and shape. The data lies at a multiple of 64 bytes from the item's start.
Nothing here allocates memory of the tensor's size.

Source of the layout: torch/csrc/caffe2/serialize/inline_container.cc and the zip specification (APPNOTE 6.3.10).
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ALIGNMENT", "Frame", "frame_of"]

# The alignment of every record's data, which torch's writer also records in the archive.
ALIGNMENT = 64

_ARCHIVE = "archive"
_STORED = 0
_UTF8_NAMES = 1 << 11
_SIZES_FOLLOW = 1 << 3
_FITS_32_BITS = 0xFFFFFFFF
_ZIP64_VERSION = 45

# Tensors of other dtypes have an untyped storage and name their dtype beside it.
_TYPED_STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """An item is `head`, the tensor's bytes in C order, `tail`."""

    head: bytes
    tail: bytes


@functools.lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """The frame of a contiguous tensor."""
    archive = _Archive()
    archive.add("data.pkl", _pickled_tensor(dtype, shape))
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT).encode())
    archive.add("byteorder", sys.byteorder.encode())
    head = archive.open("data/0", shape.numel() * dtype.itemsize)
    archive.add("version", b"3\n")
    return Frame(head, archive.close())


class _StoragePlaceholder:
    """Represents the storage while its tensor is pickled."""


class _TensorPlaceholder:
    """Pickles as a torch tensor does, without a tensor."""

    def __init__(self, rebuild: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = rebuild, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, storage_type: Any, elements: int) -> None:
        super().__init__(stream, protocol=2)
        self._storage = ("storage", storage_type, "0", "cpu", elements)

    def persistent_id(self, obj: Any) -> Any:
        return self._storage if isinstance(obj, _StoragePlaceholder) else None


def _pickled_tensor(dtype: torch.dtype, shape: torch.Size) -> bytes:
    elements = shape.numel()
    storage_type = _TYPED_STORAGES.get(dtype)
    size = tuple(shape)
    hooks: collections.OrderedDict[int, Any] = collections.OrderedDict()
    arguments: tuple[Any, ...] = (_StoragePlaceholder(), 0, size, _contiguous_strides(size), False, hooks)
    rebuild: Any = torch._utils._rebuild_tensor_v2
    if storage_type is None:
        arguments, rebuild = (*arguments, dtype), torch._utils._rebuild_tensor_v3
        storage_type, elements = torch.UntypedStorage, elements * dtype.itemsize
    stream = io.BytesIO()
    _Pickler(stream, storage_type, elements).dump(_TensorPlaceholder(rebuild, arguments))
    return stream.getvalue()


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _flags(size: int) -> int:
    return _UTF8_NAMES | (_SIZES_FOLLOW if size > 0 else 0)


class _Archive:
    """A zip archive of stored records, written front to back, with one gap for the data of a record.

    Checksums of records are zero, as torch writes them under `set_crc32_options(False)`: its reader ignores them, and
    that of the gap is unknown. The checkpoint's manifest has a checksum of the whole file.
    """

    def __init__(self) -> None:
        self._position = 0
        self._pieces: list[bytes] = []
        self._directory: list[bytes] = []
        self._open: tuple[str, int, int] | None = None

    def add(self, name: str, data: bytes) -> None:
        """Add a small record."""
        self._begin(name, len(data))
        self._put(data)

    def open(self, name: str, size: int) -> bytes:
        """Begin the record whose `size` bytes are filled in elsewhere; returns all bytes before them."""
        self._begin(name, size)
        head = b"".join(self._pieces)
        self._pieces.clear()
        self._position += size
        return head

    def close(self) -> bytes:
        """End the archive; returns all bytes after the gap."""
        self._end()
        start = self._position
        for entry in self._directory:
            self._put(entry)
        length, records = self._position - start, len(self._directory)
        end = self._position
        version = _ZIP64_VERSION
        self._put(
            struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 798, version, 0, 0, records, records, length, start)
        )
        self._put(struct.pack("<IIQI", 0x07064B50, 0, end, 1))
        short = min(length, _FITS_32_BITS), min(start, _FITS_32_BITS)
        self._put(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, records, records, *short, 0))
        return b"".join(self._pieces)

    def _begin(self, name: str, size: int) -> None:
        self._end()
        encoded = f"{_ARCHIVE}/{name}".encode()
        start = self._position
        fixed = struct.calcsize("<IHHHHHIIIHH") + len(encoded)
        large = self._zip64(size, 0)
        padding = -(start + fixed + len(large) + 4) % ALIGNMENT
        extra = large + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        names = len(encoded), len(extra)
        # Sizes that do not fit are marked here. All sizes follow after the data and in the directory.
        sizes = (_FITS_32_BITS, _FITS_32_BITS) if large else (0, 0)
        flags = _flags(size)
        self._put(struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, flags, _STORED, 0, 0, 0, *sizes, *names))
        self._put(encoded + extra)
        self._open = name, start, size

    def _end(self) -> None:
        """Describe the open record, after its data and in the directory."""
        if self._open is None:
            return
        name, start, size = self._open
        self._open = None
        encoded = f"{_ARCHIVE}/{name}".encode()
        large = self._zip64(size, start)
        if size > 0:
            self._put(struct.pack("<IIQQ" if size >= _FITS_32_BITS else "<IIII", 0x08074B50, 0, size, size))
        shown = min(size, _FITS_32_BITS)
        entry = _packed(
            signature=("I", 0x02014B50),
            made_by=("H", 0),
            needed_to_read=("H", 0),
            flags=("H", _flags(size)),
            method=("H", _STORED),
            time=("H", 0),
            date=("H", 0),
            checksum=("I", 0),
            stored_size=("I", shown),
            size=("I", shown),
            name_length=("H", len(encoded)),
            extra_length=("H", len(large)),
            comment_length=("H", 0),
            disk=("H", 0),
            internal_attributes=("H", 0),
            external_attributes=("I", 0),
            start=("I", min(start, _FITS_32_BITS)),
        )
        self._directory.append(entry + encoded + large)

    @staticmethod
    def _zip64(size: int, start: int) -> bytes:
        """The extra field for values that do not fit into 32 bits."""
        values = [value for value in (size, size, start) if value >= _FITS_32_BITS]
        return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""

    def _put(self, data: bytes) -> None:
        self._pieces.append(data)
        self._position += len(data)


def _packed(**fields: tuple[str, int]) -> bytes:
    """Pack fields, each given by its `struct` format and its value."""
    forms = "".join(form for form, _ in fields.values())
    return struct.pack(f"<{forms}", *(value for _, value in fields.values()))
