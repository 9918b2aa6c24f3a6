"""Describes the tensors that travel: dtypes, shapes, their offsets in one buffer, and the views made of them.

*Leaves* are the plain tensors of an object. Those that overlap are views of one tensor that travels. `memory_regions`
chooses these tensors; `BufferLayout.leaves` makes the leaves of them again.

Invariants:

1. Tensors that travel are plain, and no two overlap. A copy of a tensor with gaps is contiguous.
2. A layout depends on dtypes, shapes and the strides of views; never on values.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Final

import torch
from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "DLPACK_DTYPES",
    "BufferLayout",
    "LeafSource",
    "contiguous_strides",
    "decode_layout",
    "layout_of",
    "layout_of_dlpack",
]

# Bytes. Each tensor in a buffer begins at a multiple of it: enough for every dtype, vector unit and DMA.
ALIGNMENT: Final = 64

# How a leaf is made of the tensors that travel: the number of the tensor that it is, or
# (number, dtype or None, size, stride, offset): a view of that tensor, offset in bytes, dtype if it is another one.
View = tuple[int, torch.dtype | None, tuple[int, ...], tuple[int, ...], int]
LeafSource = int | View

# Dtypes by DLPack's code and bits. Complex ones are missing: their values may be conjugated lazily.
DLPACK_DTYPES: dict[tuple[int, int], torch.dtype] = {
    **{(0, bits): getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{(1, bits): getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{(2, bits): getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    (4, 16): torch.bfloat16,
    (6, 8): torch.bool,
    (10, 8): torch.float8_e4m3fn,
    (11, 8): torch.float8_e4m3fnuz,
    (12, 8): torch.float8_e5m2,
    (13, 8): torch.float8_e5m2fnuz,
}


@dataclass(frozen=True)
class BufferLayout:
    """Dtypes and shapes of the tensors that travel, and how leaves are made of them. Sizes and offsets are in bytes.

    Attributes:
        leaf_sources: how each leaf is made; None if the tensors are the leaves.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    leaf_sources: tuple[LeafSource, ...] | None

    @cached_property
    def sizes(self) -> list[int]:
        """The size of each tensor, without gaps."""
        return [shape.numel() * dtype.itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each tensor begins in one buffer that contains them all, in order."""
        offsets, end = [], 0
        for size in self.sizes:
            offsets.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return offsets

    @cached_property
    def has_byte_integers(self) -> bool:
        """Whether a dtype is an integer of one byte."""
        return torch.uint8 in self.dtypes or torch.int8 in self.dtypes

    @cached_property
    def _widths(self) -> dict[int, int]:
        """The widest item size of the leaves that are views of a tensor, by the tensor's number."""
        widths: dict[int, int] = {}
        for source in self.leaf_sources or ():
            if not isinstance(source, int):
                width = (source[1] or self.dtypes[source[0]]).itemsize
                widths[source[0]] = max(width, widths.get(source[0], 0))
        return widths

    @cached_property
    def size_bytes(self) -> bytes:
        """The sizes as native 64-bit integers."""
        return array("Q", self.sizes).tobytes()

    @cached_property
    def offset_bytes(self) -> bytes:
        """The offsets as native 64-bit integers."""
        return array("Q", self.offsets).tobytes()

    @cached_property
    def total(self) -> int:
        """The size of the buffer."""
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes)

    @cached_property
    def encoded(self) -> bytes:
        """The layout in bytes, for `decode_layout`."""
        names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        leaf_sources = self.leaf_sources and [
            source
            if isinstance(source, int)
            else (source[0], source[1] and str(source[1]).removeprefix("torch."), *source[2:])
            for source in self.leaf_sources
        ]
        return pickle.dumps((names, list(map(tuple, self.shapes)), leaf_sources), 5)

    def leaves(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Make the leaves from the tensors that travelled.

        Args:
            tensors: tensors with the dtypes and shapes of this layout.

        Returns:
            The leaves: `tensors`, or views of them.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> rows = torch.zeros(4, 2)
            >>> tensors, schema = td.tree.flatten([rows, rows[0]])
            >>> [tuple(leaf.shape) for leaf in schema.layout.leaves(tensors)]
            [(4, 2), (2,)]
        """
        if self.leaf_sources is None:
            return tensors
        bases = {slot: _base(tensors[slot], width) for slot, width in self._widths.items()}
        return [
            tensors[source] if isinstance(source, int) else _view(bases[source[0]], source)
            for source in self.leaf_sources
        ]

    def tensors_in(self, buffer: Tensor) -> list[Tensor]:
        """Make the tensors at their `offsets` in a buffer. Nothing is copied.

        Args:
            buffer: contiguous, uint8, at least `total` long; it begins at a multiple of `ALIGNMENT`.

        Returns:
            One tensor for each shape of the layout, in order; they keep the buffer's memory alive.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> _, schema = td.tree.flatten([torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)])
            >>> buffer = torch.zeros(schema.layout.total, dtype=torch.uint8)
            >>> [tuple(tensor.shape) for tensor in schema.layout.tensors_in(buffer)]
            [(2, 3), (4,)]
        """
        storage, first = buffer.untyped_storage(), buffer.storage_offset()
        device = buffer.device
        # Each tensor has a version counter of its own, so autograd does not take a write to one as a change of others.
        return [
            torch.empty(0, dtype=dtype, device=device).set_(
                storage, (first + offset) // dtype.itemsize, shape, contiguous_strides(shape)
            )
            for dtype, shape, offset in zip(self.dtypes, self.shapes, self.offsets, strict=True)
        ]


@lru_cache(256)
def layout_of(
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[torch.Size, ...],
    leaf_sources: tuple[LeafSource, ...] | None,
) -> BufferLayout:
    """The layout with these fields: one object for equal fields."""
    return BufferLayout(dtypes, shapes, leaf_sources)


@lru_cache(256)
def decode_layout(encoded: bytes) -> BufferLayout:
    """The layout that `BufferLayout.encoded` returned as `encoded`."""
    names, shapes, leaf_sources = pickle.loads(encoded)  # noqa: S301 (from a rank of the same job)
    return layout_of(
        tuple(getattr(torch, name) for name in names),
        tuple(map(torch.Size, shapes)),
        leaf_sources
        and tuple(
            source
            if isinstance(source, int)
            else (source[0], source[1] and getattr(torch, source[1]), *source[2:])
            for source in leaf_sources
        ),
    )


@lru_cache(256)
def layout_of_dlpack(words: bytes) -> BufferLayout | None:
    """The layout of the plain tensors that `TensorExchange.read` described by `words`; None for an unknown dtype."""
    dtypes: list[torch.dtype] = []
    shapes: list[torch.Size] = []
    rest = iter(array("Q", words))
    for word in rest:
        count, dtype = word >> 32, DLPACK_DTYPES.get((word >> 16 & 0xFFFF, word >> 8 & 0xFF))
        if dtype is None:
            return None
        dtypes += [dtype] * count
        shapes += [torch.Size(islice(rest, word & 0xFF))] * count
    return layout_of(tuple(dtypes), tuple(shapes), None)


def _base(tensor: Tensor, width: int) -> Tensor:
    """`tensor`, or a contiguous copy of it that begins at a multiple of `width` bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % width else tensor


def _view(tensor: Tensor, source: View) -> Tensor:
    _, dtype, size, stride, offset = source
    if dtype is None:
        step = tensor.itemsize
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset // step)
    first = tensor.storage_offset() * tensor.itemsize + offset
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        tensor.untyped_storage(), first // dtype.itemsize, size, stride
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
