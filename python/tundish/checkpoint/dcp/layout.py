"""Where everything that a rank saves lies in its file.

Owns the layout of a `.distcp` file: the tensors first, each an item as `record` frames it, then the other
objects. What always holds: the layout follows from the form of the state dict, from which of it the rank saves and
from the lengths of the pickled objects; every byte of a file is either a tensor's or is put there by `fill`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan

from tundish.checkpoint.dcp.leaves import Leaves
from tundish.checkpoint.dcp.record import ALIGNMENT, Frame, frame_of
from tundish.checkpoint.staging.buffers import PAGE, Buffer, Place, Places
from tundish.checkpoint.tensors import local_of

__all__ = ["Layout", "TensorItem", "Window", "tensor_items"]


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor in the file: leaf `number`, framed at `start` … `stop` - 1."""

    number: int
    name: str
    dtype: torch.dtype
    size: torch.Size
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
            items.append(TensorItem(number, name, local.dtype, local.shape, frame, start, stop))
            start = stop + -stop % ALIGNMENT
    return items


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes `start` … `stop` - 1 of the file, with `tensors` in it; the last of a file also has all other objects.

    `start`: a multiple of `PAGE`; what lies before the first tensor belongs to the window before.
    """

    tensors: Sequence[TensorItem]
    start: int
    stop: int
    is_last: bool


class Layout:
    """The file of one rank.

    `tensors`: its tensors. `objects`: names of its other objects, in order, to the lengths of their pickles. `plan`:
    what torch's planner made of it, once it was asked. `whole`: all of the file, and where its tensors lie.
    """

    def __init__(self, tensors: list[TensorItem], objects: Mapping[str, int]) -> None:
        self.tensors = tensors
        self.objects = dict(objects)
        self.plan: SavePlan | None = None
        self._objects_start = tensors[-1].stop if tensors else 0
        self.size = self._objects_start + sum(objects.values())
        self.whole = Window(self.tensors, 0, self.size, is_last=True)
        # A training loop saves the same tensors again and again.
        self.places_in_whole = self.tensor_places(self.whole)

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Of each item its name, where it starts, and its length."""
        for item in self.tensors:
            yield item.name, item.start, item.stop - item.start
        start = self._objects_start
        for name, length in self.objects.items():
            yield name, start, length
            start += length

    def windows(self, window_bytes: int) -> list[Window]:
        """The file in windows of up to `window_bytes`, or of one tensor, or of all other objects, that take more."""
        runs: list[list[TensorItem]] = [[]]
        for item in self.tensors:
            if runs[-1] and item.stop - runs[-1][0].start // PAGE * PAGE > window_bytes:
                runs.append([])
            runs[-1].append(item)
        starts = [run[0].start if run else 0 for run in runs]
        return [
            Window(run, start // PAGE * PAGE, stop, is_last=run is runs[-1])
            for run, start, stop in zip(runs, starts, [*starts[1:], self.size], strict=True)
        ]

    def tensor_places(self, window: Window) -> Places:
        """Where the tensors of a window lie in a buffer that holds its bytes."""
        return Places(
            Place(
                item.data - window.start,
                item.stop - len(item.frame.tail) - window.start,
                item.dtype,
                item.size,
            )
            for item in window.tensors
        )

    def fill(self, buffer: Buffer, window: Window, objects: Mapping[str, bytes]) -> None:
        """Put everything of a window but the tensors into `buffer`."""
        memory = memoryview(buffer.image)
        end = self._objects_start if window.is_last else window.stop
        for item, following in itertools.zip_longest(window.tensors, window.tensors[1:]):
            tail = item.frame.tail
            stop = end if following is None else following.start
            memory[item.start - window.start : item.data - window.start] = item.frame.head
            memory[item.stop - len(tail) - window.start : stop - window.start] = tail + bytes(
                stop - item.stop
            )
        if window.is_last:
            memory[end - window.start :] = b"".join(objects[name] for name in self.objects)
