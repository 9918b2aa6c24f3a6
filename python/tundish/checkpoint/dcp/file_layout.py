"""Names of the files in a DCP checkpoint, and the byte offsets in a rank's `.distcp` file.

A file holds first the tensors as torch records, then the other objects.

Invariant: every byte of a file belongs to a tensor or is written by `fill`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from tundish.checkpoint.dcp.torch_record_format import ALIGNMENT, RecordFrame, record_frame_of
from tundish.checkpoint.staging.buffers import Buffer, Place

__all__ = ["METADATA", "FileLayout", "rank_extra_name", "shard_name"]

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

    def fill(self, buffer: Buffer, objects: Sequence[bytes]) -> None:
        """Write everything except the tensors into `buffer`, which holds the whole file."""
        memory = memoryview(buffer.image)
        stop = 0
        for frame, place in zip(self._frames, self.tensor_places, strict=True):
            start = place.start - len(frame.head)
            memory[stop : place.start] = bytes(start - stop) + frame.head
            stop = place.stop + len(frame.tail)
            memory[place.stop : stop] = frame.tail
        memory[self._objects_start :] = b"".join(objects)
