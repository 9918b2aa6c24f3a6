"""The bytes of a DCP checkpoint: names of its files, and the offsets in a rank's `.distcp` file.

A file holds first the tensors as `torch.save` writes them, then the other objects. An item of a tensor is an
uncompressed zip archive with the tensor's raw bytes in it. A `RecordFrame` is that archive without them, so that a
tensor is copied once, directly to its place in the file.

Invariants:
    - Every byte of a file belongs to a tensor, or to what `FileLayout` puts around it.
    - A frame depends only on dtype, shape and the version of torch. The memory of a tensor is not touched.
"""

from __future__ import annotations

import functools
import io
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch.serialization import skip_data

from tundish.checkpoint.write_plan import Place, PlannedFile

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


# torch's description of the checkpoint.
METADATA = ".metadata"


def shard_name(index: int) -> str:
    """The tensors and objects of a rank, by its index in the group; named as torch's own writer names it."""
    return f"__{index}_0.distcp"


def rank_extra_name(index: int) -> str:
    """The `rank_extra` of a rank, by its index in the group."""
    return f"rank_extra-{index:05d}.json"


class FileLayout:
    """The layout of one rank's file.

    Args:
        tensors: dtype and shape of each tensor.
        object_lengths: bytes of each other object.

    Attributes:
        size: bytes of the file.
        tensor_places: of the tensors' bytes, in order.
    """

    def __init__(
        self, tensors: Iterable[tuple[torch.dtype, torch.Size]], object_lengths: Sequence[int]
    ) -> None:
        self.object_lengths = object_lengths
        self._frames: list[RecordFrame] = []
        self.tensor_places: list[Place] = []
        start = self._objects_start = 0
        for dtype, shape in tensors:
            frame = record_frame_of(dtype, shape)
            first = start + len(frame.head)
            last = first + shape.numel() * dtype.itemsize
            self._frames.append(frame)
            self.tensor_places.append(Place(first, last, dtype, shape))
            self._objects_start = last + len(frame.tail)
            start = self._objects_start + -self._objects_start % ALIGNMENT
        self.size = self._objects_start + sum(object_lengths)

    def items(self) -> Iterator[tuple[int, int]]:
        """Start and length of each item with its frame; the tensors first."""
        for frame, place in zip(self._frames, self.tensor_places, strict=True):
            start = place.start - len(frame.head)
            yield start, place.stop + len(frame.tail) - start
        start = self._objects_start
        for length in self.object_lengths:
            yield start, length
            start += length

    def frames(self, objects: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        """Start and contents of everything except the tensors, which lie between them."""
        stop, tail = 0, b""
        for frame, place in zip(self._frames, self.tensor_places, strict=True):
            gap = place.start - len(frame.head) - stop - len(tail)
            yield stop, tail + bytes(gap) + frame.head
            stop, tail = place.stop, frame.tail
        yield stop, tail + b"".join(objects)

    def file(
        self, name: str, sources: Sequence[torch.Tensor], names: Sequence[str], objects: Sequence[bytes]
    ) -> PlannedFile:
        """The file `name` of these tensors, with `names` for messages, and of these other objects."""
        return PlannedFile(
            name=name,
            size=self.size,
            places=self.tensor_places,
            sources=sources,
            names=names,
            frames=functools.partial(self.frames, objects),
        )
