"""The format of one tensor in a DCP file, as `torch.save` writes it.

An item of a `.distcp` file is an uncompressed zip archive with the tensor's raw bytes in it. A `RecordFrame` is that
archive without them, so that a tensor is copied once, directly to its place in the file.

Invariants: a frame depends only on dtype, shape and the version of torch. The memory of a tensor is not touched.
"""

from __future__ import annotations

import functools
import io
import mmap
import sys
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch.serialization import skip_data

__all__ = ["ALIGNMENT", "RecordFrame", "record_frame_of"]

# Items begin at multiples of this. torch aligns the data in an archive so.
ALIGNMENT = 64

# Of Linux; Python names it from 3.13 on.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """An item is `head`, the tensor's bytes in C order, `tail`."""

    head: bytes
    tail: bytes


class _FrameStream(io.RawIOBase):
    """Collects what torch writes before and after the bytes of the tensor, over which it seeks."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def write(self, data: object) -> int:
        written = bytes(data)  # type: ignore[call-overload]  # a buffer
        self.parts[-1] += written
        return len(written)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR:
            raise io.UnsupportedOperation("torch seeks forward only")
        self.parts.append(bytearray())
        return offset


@functools.lru_cache(maxsize=4096)
def record_frame_of(dtype: torch.dtype, shape: torch.Size) -> RecordFrame:
    """The frame of a contiguous tensor."""
    size = shape.numel() * dtype.itemsize
    tensor = torch.empty(shape, dtype=dtype, device="cpu") if size == 0 else _untouched(size).view(dtype)
    stream = _FrameStream()
    with skip_data():
        torch.save(tensor.view(shape), cast("IO[bytes]", stream))
    head, *tail = stream.parts
    return RecordFrame(bytes(head), b"".join(tail))


def _untouched(size: int) -> torch.Tensor:
    """So many bytes of address space, to which the system gives no memory."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8)
