"""Merges tensors that overlap, so that shared memory is sent once, and lays out one buffer for them.

*Leaves* are the plain tensors of an object. Leaves that overlap are views of one tensor that is sent.
`BufferLayout.leaves` makes the leaves again.

Invariants:

1. Tensors that travel are plain, and no two overlap. Leaves that only lie beside each other travel apart.
2. A tensor is copied only if its first byte does not lie at a multiple of its item size. A copy of a tensor with gaps
   is contiguous.
3. A layout depends on dtypes, shapes and the strides of views; never on values.
"""

from __future__ import annotations

import ctypes
import operator
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from typing import Final

import torch
from torch import Tensor

from tundish import _native
from tundish.tensor_bytes import extent

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
        array_leaves: the leaves that numpy arrays are made of.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    leaf_sources: tuple[LeafSource, ...] | None
    array_leaves: tuple[int, ...]

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
    def host_only_tensors(self) -> frozenset[int]:
        """Numbers of the tensors that may stay in host memory, since only arrays are made of them."""
        arrays, leaf_sources = frozenset(self.array_leaves), self.leaf_sources
        if leaf_sources is None or not arrays:
            return arrays
        carried = [source if isinstance(source, int) else source[0] for source in leaf_sources]
        others = {number for leaf, number in enumerate(carried) if leaf not in arrays}
        return frozenset(carried[leaf] for leaf in arrays) - others

    @cached_property
    def encoded(self) -> bytes:
        """The layout in bytes, for `decode_layout`."""
        return pickle.dumps(
            (self.dtypes, [*map(tuple, self.shapes)], self.leaf_sources, self.array_leaves), 5
        )

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
    leaf_sources: tuple[LeafSource, ...] | None = None,
    array_leaves: tuple[int, ...] = (),
) -> BufferLayout:
    """The layout with these fields: one object for equal fields."""
    return BufferLayout(dtypes, shapes, leaf_sources, array_leaves)


@lru_cache(256)
def decode_layout(encoded: bytes) -> BufferLayout:
    """The layout that `BufferLayout.encoded` returned as `encoded`."""
    dtypes, shapes, leaf_sources, array_leaves = pickle.loads(encoded)  # noqa: S301 (from a rank of the same job)
    return layout_of(dtypes, tuple(map(torch.Size, shapes)), leaf_sources, array_leaves)


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
    return layout_of(tuple(dtypes), tuple(shapes))


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


# Their values may be more than their bytes: conjugate views and quantized tensors.
_MAY_BE_MORE = frozenset(
    {torch.complex32, torch.complex64, torch.complex128}
    | {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
)

# Bytes. A multiple of the item size of every dtype.
_WIDEST = 16

_get_dtype = operator.attrgetter("dtype")
_get_is_cpu = operator.attrgetter("is_cpu")
_get_requires_grad = operator.attrgetter("requires_grad")
_get_shape = operator.attrgetter("shape")

# Reads dtypes, shapes and addresses of many tensors at once; None before torch 2.10.
DLPACK_EXCHANGE: Final = _native.TensorExchange.of(Tensor)


def layout_as_is(leaves: list[Tensor]) -> tuple[BufferLayout, bytes] | None:
    """The layout and addresses of leaves that can travel as they are; None if they cannot.

    They can if all are plain and contiguous and no two overlap. Each leaf is exactly a `torch.Tensor`. The addresses
    are native 64-bit integers; there are none unless all leaves are in host memory. No leaf counts as an array's.
    """
    try:
        return (
            _layout_from_attributes(leaves)
            if DLPACK_EXCHANGE is None
            else _layout_from_dlpack(leaves, DLPACK_EXCHANGE)
        )
    except RuntimeError:
        # Tensors without memory have no address, and nested ones no shape.
        return None


def _layout_from_dlpack(
    leaves: list[Tensor], exchange: _native.TensorExchange
) -> tuple[BufferLayout, bytes] | None:
    read = exchange.read(leaves)
    if read is None:
        return None
    words, addresses = read
    layout = layout_of_dlpack(words)
    # Several dtypes of one byte have the same code, as uint4 and uint8.
    if layout is None or (layout.has_byte_integers and tuple(map(_get_dtype, leaves)) != layout.dtypes):
        return None
    return layout, addresses


def _layout_from_attributes(leaves: list[Tensor]) -> tuple[BufferLayout, bytes] | None:
    if any(map(_get_requires_grad, leaves)) or any(map(Tensor.is_neg, leaves)):
        return None
    dtypes, addresses = tuple(map(_get_dtype, leaves)), list(map(Tensor.data_ptr, leaves))
    if 0 in addresses or not _MAY_BE_MORE.isdisjoint(dtypes) or not all(map(Tensor.is_contiguous, leaves)):
        return None
    layout = layout_of(dtypes, tuple(map(_get_shape, leaves)))
    spans = sorted(zip(addresses, layout.sizes, strict=True))
    # Also an address that is there twice, whatever the sizes.
    if any(one == other or one + size > other for (one, size), (other, _) in pairwise(spans)):
        return None
    return layout, array("Q", addresses).tobytes() if all(map(_get_is_cpu, leaves)) else b""


def tensors_to_send(
    leaves: list[Tensor], array_leaves: tuple[int, ...]
) -> tuple[list[Tensor], BufferLayout, bytes]:
    """The tensors that travel for plain `leaves`, their layout, and their addresses as `layout_as_is` returns them.

    There are no addresses if a tensor has gaps.
    """
    tensors: list[Tensor] = []
    leaf_sources: list[LeafSource] = [0] * len(leaves)
    leaves = [leaf if leaf.data_ptr() % leaf.itemsize == 0 else leaf.clone() for leaf in leaves]
    for region in _regions(leaves):
        if len(region.numbers) == 1:
            (number,) = region.numbers
            tensor, leaf_sources[number] = _single_leaf(leaves[number], len(tensors))
        else:
            tensor = _whole_region(leaves, region, len(tensors), leaf_sources)
        tensors.append(tensor)
    is_as_is = leaf_sources == list(range(len(leaves)))
    layout = layout_of(
        tuple(map(_get_dtype, tensors)),
        tuple(map(_get_shape, tensors)),
        None if is_as_is else tuple(leaf_sources),
        array_leaves,
    )
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
        return tensors, layout, b""
    return tensors, layout, array("Q", map(Tensor.data_ptr, tensors)).tobytes()


def _regions(leaves: list[Tensor]) -> list[_Region]:
    """The regions of memory that the leaves lie in, in the order of their first leaf. No two overlap."""
    regions: list[_Region] = []
    for number, leaf in enumerate(leaves):
        # Addresses on a device are compared within one storage only.
        where = 0 if leaf.device.type == "cpu" else leaf.untyped_storage().data_ptr()
        start = leaf.data_ptr()
        memory = leaf.device.type, leaf.device.index or 0, where
        regions.append(_Region(memory, start, start + extent(leaf) * leaf.itemsize, leaf.dtype, [number]))
    # By address, the longer first: then a region only grows at its end.
    regions.sort(key=lambda one: (one.memory, one.start, -one.end))
    apart: list[_Region] = []
    for region in regions:
        grown = region
        while apart and apart[-1].reaches(grown):
            grown = apart.pop().joined(grown)
        if region.start < region.end:
            apart.append(grown)
    empty = [region for region in regions if region.start == region.end]
    return sorted(apart + empty, key=lambda one: min(one.numbers))


@dataclass(slots=True)
class _Region:
    """Bytes `start` to `end` of `memory` (device type, device index, storage), and the numbers of the leaves in it.

    `dtype` is None if the leaves have several. The region then begins at a multiple of `_WIDEST`. So views of every
    dtype stay aligned in a copy of the region.
    """

    memory: tuple[str, int, int]
    start: int
    end: int
    dtype: torch.dtype | None
    numbers: list[int]

    def reaches(self, later: _Region) -> bool:
        """Whether it overlaps `later`, which does not end before this region begins."""
        return later.start < later.end and self.memory == later.memory and self.end > later.start

    def joined(self, later: _Region) -> _Region:
        dtype = self.dtype if self.dtype == later.dtype else None
        start = min(self.start, later.start)
        if dtype is None:
            start -= start % _WIDEST
        return _Region(self.memory, start, max(self.end, later.end), dtype, self.numbers + later.numbers)


def _single_leaf(leaf: Tensor, slot: int) -> tuple[Tensor, LeafSource]:
    """The tensor that travels for a leaf that overlaps no other leaf."""
    if leaf.is_contiguous():
        return leaf, slot
    shape, stride = tuple(leaf.shape), tuple(map(int, leaf.stride()))
    span = extent(leaf)
    if span <= leaf.numel():
        # Without gaps: permuted, or expanded.
        return leaf.as_strided((span,), (1,)), (slot, None, shape, stride, 0)
    unrepeated = leaf
    for dimension, step in enumerate(stride):
        if step == 0:
            unrepeated = unrepeated.narrow(dimension, 0, 1)
    if unrepeated.shape == leaf.shape:
        return leaf, slot
    strides_of_view = tuple(
        0 if step == 0 else one
        for step, one in zip(stride, contiguous_strides(unrepeated.shape), strict=True)
    )
    return unrepeated, (slot, None, shape, strides_of_view, 0)


def _whole_region(leaves: list[Tensor], region: _Region, slot: int, leaf_sources: list[LeafSource]) -> Tensor:
    """A tensor of all memory of a region, with the bytes between its leaves."""
    dtype = region.dtype or torch.uint8
    for number in region.numbers:
        leaf = leaves[number]
        other = None if leaf.dtype == dtype else leaf.dtype
        size, stride = tuple(leaf.shape), tuple(map(int, leaf.stride()))
        leaf_sources[number] = slot, other, size, stride, leaf.data_ptr() - region.start
    first, length = region.start, region.end - region.start
    members = [leaves[number] for number in region.numbers]
    for storage in map(Tensor.untyped_storage, members):
        before = first - storage.data_ptr()
        if before >= 0 and before + length <= storage.nbytes() and before % dtype.itemsize == 0:
            empty = torch.empty(0, dtype=dtype, device=members[0].device)
            return empty.set_(storage, before // dtype.itemsize, (length // dtype.itemsize,), (1,))
    # Arrays that overlap in part have storages of their own, and no storage has the whole region.
    memory = (ctypes.c_uint8 * length).from_address(first)
    memory._members = members  # type: ignore[attr-defined]  # keeps the memory alive
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
