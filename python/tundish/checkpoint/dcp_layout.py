"""Where everything that a rank saves lies in its file.

Owns the layout of a `.distcp` file: the tensors first, each an item as `dcp_record` frames it, then the other
objects. What always holds: the layout follows from the form of the state dict, from which of it the rank saves and
from the lengths of the pickled objects; every byte of a file is either a tensor's or is put there by `fill`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan

from tundish.checkpoint.dcp_leaves import Leaves
from tundish.checkpoint.dcp_record import ALIGNMENT, Frame, frame_of
from tundish.checkpoint.images import Buffer
from tundish.checkpoint.tensors import local_of

__all__ = ["Layout", "TensorItem", "tensor_items"]


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor in the file: leaf `number`, framed at `start` … `stop` - 1."""

    number: int
    name: str
    dtype: torch.dtype
    size: torch.Size
    strides: tuple[int, ...]
    frame: Frame
    start: int
    stop: int

    @property
    def data(self) -> int:
        """Where its bytes begin."""
        return self.start + len(self.frame.head)


def tensor_items(leaves: Leaves, owned: Sequence[bool]) -> list[TensorItem]:
    """The items of the tensors among the owned leaves, in order."""
    items = []
    start = 0
    for number, (name, value) in enumerate(leaves):
        if owned[number] and isinstance(value, torch.Tensor):
            local = local_of(value)
            frame = frame_of(local.dtype, local.shape)
            stop = start + len(frame.head) + local.nbytes + len(frame.tail)
            strides = torch.empty(local.shape, device="meta").stride()
            items.append(TensorItem(number, name, local.dtype, local.shape, strides, frame, start, stop))
            start = stop + -stop % ALIGNMENT
    return items


class Layout:
    """The file of one rank.

    `tensors`: its tensors. `objects`: names of its other objects, in order, to the lengths of their pickles. `plan`:
    what torch's planner made of it, once it was asked.
    """

    def __init__(self, tensors: list[TensorItem], objects: Mapping[str, int]) -> None:
        self.tensors = tensors
        self.objects = dict(objects)
        self.plan: SavePlan | None = None
        self._objects_start = tensors[-1].stop if tensors else 0
        self.size = self._objects_start + sum(objects.values())

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Of each item its name, where it starts, and its length."""
        for item in self.tensors:
            yield item.name, item.start, item.stop - item.start
        start = self._objects_start
        for name, length in self.objects.items():
            yield name, start, length
            start += length

    def views(self, buffer: Buffer) -> list[torch.Tensor]:
        """The tensors as they lie in `buffer`."""
        views = []
        for dtype, items in itertools.groupby(self.tensors, lambda item: item.dtype):
            # An item ends with more bytes than an element has, so that nothing of it is cut off.
            flat = buffer.bytes[: buffer.bytes.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            views += [flat.as_strided(item.size, item.strides, item.data // dtype.itemsize) for item in items]
        return views

    def fill(self, buffer: Buffer, objects: Mapping[str, bytes]) -> None:
        """Put everything but the tensors into `buffer`."""
        memory = memoryview(buffer.image)
        for item, following in itertools.zip_longest(self.tensors, self.tensors[1:]):
            head, tail = item.frame.head, item.frame.tail
            memory[item.start : item.data] = head
            end = self._objects_start if following is None else following.start
            memory[item.stop - len(tail) : end] = tail + bytes(end - item.stop)
        memory[self._objects_start :] = b"".join(objects[name] for name in self.objects)
