"""A batch that is to be sent: taken apart, and written into memory.

What always holds: a batch is taken apart before any rank has been sent anything, so that what cannot be carried is
refused in time; it is written as its layout says, whatever its tensors look like and wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tundish import _native
from tundish.tree import flatten_with_addresses

__all__ = ["OutgoingBatch", "threads_beside", "threads_of"]

# As these tensors of any dtype are copied: of some torch knows no more than how wide they are.
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# More of them do not make a copy faster.
_MOST_THREADS = 4
# Bytes of an address, a size or an offset.
_WORD = 8


class OutgoingBatch:
    """A batch as it is to be sent.

    Attributes:
        schema: of the batch.
        tensors: those that are carried.
        size: bytes of them, as the layout has them.
        is_plain: whether all of them are bytes in host memory, one after the other.
        threads: how many may copy.
    """

    __slots__ = ("_addresses", "is_plain", "schema", "size", "tensors", "threads")

    def __init__(self, batch: Any, rank: int, threads: int) -> None:
        self.tensors, self.schema, self._addresses = flatten_with_addresses(batch, f"rank {rank}'s batch")
        self.size = self.schema.layout.total
        self.threads = threads
        self.is_plain = bool(self._addresses) or not self.tensors

    @property
    def numbers(self) -> range:
        """The numbers of all tensors."""
        return range(len(self.tensors))

    def write(self, parcel: _native.SendBuffer) -> None:
        """Write the tensors where the layout says, into a parcel of at least `size` bytes."""
        layout = self.schema.layout
        if self.is_plain:
            parcel.fill(self._addresses, layout.size_bytes, layout.offset_bytes, 0, self.threads)
            return
        buffer = torch.frombuffer(parcel, dtype=torch.uint8)
        for place, tensor in zip(layout.tensors_in(buffer), self.tensors, strict=True):
            _copy(place, tensor)

    def write_some(self, parcel: _native.SendBuffer, numbers: Sequence[int], start: int) -> None:
        """Write these tensors, and at most empty ones between them, into a parcel that begins with byte `start`.

        Where `start` is negative, so many bytes at the beginning are left as they are.
        """
        layout = self.schema.layout
        if self.is_plain:
            one = slice(numbers[0] * _WORD, (numbers[-1] + 1) * _WORD)
            parcel.fill(
                self._addresses[one], layout.size_bytes[one], layout.offset_bytes[one], -start, self.threads
            )
            return
        buffer = torch.frombuffer(parcel, dtype=torch.uint8)
        for number in numbers:
            first = layout.offsets[number] - start
            place = buffer[first : first + layout.sizes[number]].view(layout.dtypes[number])
            _copy(place.view(layout.shapes[number]), self.tensors[number])


def _copy(place: torch.Tensor, tensor: torch.Tensor) -> None:
    width = _WIDTHS.get(tensor.itemsize)
    if width is None:
        place.copy_(tensor)
    else:
        place.view(width).copy_(tensor.view(width))


def threads_of(receivers: int) -> int:
    """How many threads copy for so many ranks of this node, which wait for it or have work of their own."""
    return max(1, min(_MOST_THREADS, _native.available_processors() // max(1, receivers)))


def threads_beside(busy: int) -> int:
    """How many threads copy while so many ranks of this node look at what they have, and all others wait."""
    return max(1, min(_MOST_THREADS, _native.available_processors() - busy))
