"""Chooses the tensors that travel for an object's plain tensors, so that shared memory travels once.

Invariants:

1. A tensor is copied only if its first byte does not lie at a multiple of its item size.
2. Tensors that overlap travel as one region; tensors that only lie beside each other travel apart.
"""

from __future__ import annotations

import ctypes
import operator
from array import array
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tundish import _native
from tundish.tensor_bytes import extent
from tundish.tree.buffer_layout import (
    BufferLayout,
    LeafSource,
    contiguous_strides,
    layout_of,
    layout_of_dlpack,
)

__all__ = ["DLPACK_EXCHANGE", "layout_as_is", "tensors_to_send"]

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
    are native 64-bit integers; there are none unless all leaves are in host memory.
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
    layout = layout_of(dtypes, tuple(map(_get_shape, leaves)), None)
    if not _native.are_apart(addresses, layout.size_bytes):
        return None
    return layout, array("Q", addresses).tobytes() if all(map(_get_is_cpu, leaves)) else b""


def tensors_to_send(leaves: list[Tensor]) -> tuple[list[Tensor], BufferLayout, bytes]:
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
    )
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
        return tensors, layout, b""
    return tensors, layout, array("Q", map(Tensor.data_ptr, tensors)).tobytes()


def _regions(leaves: list[Tensor]) -> list[_Region]:
    """The regions of memory that the leaves lie in, none of which overlap, in the order of their first leaf."""
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
