"""Byte offsets of everything in a rank's `.distcp` file: first the tensors as torch records, then the other objects.

Invariants: the layout follows from the form of the state dict, the values that the rank saves, and the lengths of the
pickled objects. Every byte of a file belongs to a tensor or is written by `fill`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan

from tundish.checkpoint.dcp.flattened_state import FlattenedState
from tundish.checkpoint.dcp.torch_record_format import ALIGNMENT, Frame, frame_of
from tundish.checkpoint.staging.buffers import Buffer, Place, Places
from tundish.checkpoint.tensors import local_of

__all__ = ["FileLayout", "TensorItem", "tensor_items"]


@dataclass(frozen=True, slots=True)
class TensorItem:
    """The tensor with index `number` in the state, with its frame at bytes `start` … `stop` - 1 of the file."""

    number: int
    name: str
    dtype: torch.dtype
    size: torch.Size
    frame: Frame
    start: int
    stop: int

    @property
    def data(self) -> int:
        """The offset of its first byte."""
        return self.start + len(self.frame.head)


def tensor_items(state: FlattenedState, owned: Sequence[bool]) -> list[TensorItem]:
    """The items of the owned tensors, in order."""
    items = []
    start = 0
    for number, (name, value) in enumerate(state):
        if owned[number] and isinstance(value, torch.Tensor):
            local = local_of(value)
            frame = frame_of(local.dtype, local.shape)
            stop = start + len(frame.head) + local.nbytes + len(frame.tail)
            items.append(TensorItem(number, name, local.dtype, local.shape, frame, start, stop))
            start = stop + -stop % ALIGNMENT
    return items


class FileLayout:
    """The layout of one rank's file.

    Attributes:
        tensors: its tensors.
        objects: names of its other objects, in order, to the lengths of their pickles in bytes.
        plan: of torch's planner, after it was made.
        tensor_places: of the tensors in the file; made once, because a training loop saves the same tensors again.
    """

    def __init__(self, tensors: list[TensorItem], objects: Mapping[str, int]) -> None:
        self.tensors = tensors
        self.objects = dict(objects)
        self.plan: SavePlan | None = None
        self._objects_start = tensors[-1].stop if tensors else 0
        self.size = self._objects_start + sum(objects.values())
        self.tensor_places = Places(
            Place(item.data, item.stop - len(item.frame.tail), item.dtype, item.size) for item in tensors
        )

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Name, start and length of each item."""
        for item in self.tensors:
            yield item.name, item.start, item.stop - item.start
        start = self._objects_start
        for name, length in self.objects.items():
            yield name, start, length
            start += length

    def fill(self, buffer: Buffer, objects: Mapping[str, bytes]) -> None:
        """Write everything except the tensors into `buffer`, which holds the whole file."""
        memory = memoryview(buffer.image)
        for item, following in itertools.zip_longest(self.tensors, self.tensors[1:]):
            tail = item.frame.tail
            stop = self._objects_start if following is None else following.start
            memory[item.start : item.data] = item.frame.head
            memory[item.stop - len(tail) : stop] = tail + bytes(stop - item.stop)
        memory[self._objects_start :] = b"".join(objects[name] for name in self.objects)
