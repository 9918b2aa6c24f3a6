"""From plain tensors to the ones that are carried.

What always holds: nothing is copied; what overlaps in one storage is carried once, as the memory that all of it lies
in; memory that only lies beside other memory of a storage is carried on its own.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from tundish import _native
from tundish.tree.layout import Layout, Recipe, contiguous_strides, layout_of
from tundish.tree.tensors import QUANTIZED

__all__ = ["addresses_apart", "are_plain", "carry", "contiguous_layout"]

# Conjugate views have complex dtypes.
_MAY_BE_MORE = frozenset({torch.complex32, torch.complex64, torch.complex128, *QUANTIZED})

# Bytes within a storage: enough for every dtype that may be viewed there.
_WIDEST = 16

_get_dtype = operator.attrgetter("dtype")
_get_requires_grad = operator.attrgetter("requires_grad")
_get_shape = operator.attrgetter("shape")

# Where a leaf lies: the device, its first byte, one past its last, and its number.
_Piece = tuple[tuple[str, int], int, int, int]


def are_plain(leaves: list[Tensor]) -> bool:
    """Whether all of these tensors, of exactly the type `torch.Tensor`, are plain."""
    try:
        return not (
            any(map(_get_requires_grad, leaves))
            or not _MAY_BE_MORE.isdisjoint(map(_get_dtype, leaves))
            or any(map(Tensor.is_neg, leaves))
            or 0 in map(Tensor.data_ptr, leaves)
        )
    except RuntimeError:
        # Those without memory raise where they are asked for their address.
        return False


def contiguous_layout(leaves: list[Tensor]) -> Layout | None:
    """The layout in which plain tensors are carried as they are, if they can be: if all are contiguous."""
    try:
        if not all(map(Tensor.is_contiguous, leaves)):
            return None
        shapes = tuple(map(_get_shape, leaves))
    except RuntimeError:
        # A nested tensor has no shape; who looks at each will say so.
        return None
    return layout_of(tuple(map(_get_dtype, leaves)), shapes, None)


def addresses_apart(leaves: list[Tensor], layout: Layout) -> list[int] | None:
    """The addresses of contiguous tensors, if no two of them have a byte in common or begin at the same."""
    addresses = list(map(Tensor.data_ptr, leaves))
    return addresses if _native.are_apart(addresses, layout.size_bytes) else None


def carry(leaves: list[Tensor]) -> tuple[list[Tensor], Layout, list[int]]:
    """The tensors to carry for plain `leaves`, with their layout and their addresses (0: it has gaps)."""
    tensors: list[Tensor] = []
    recipes: list[Recipe] = [0] * len(leaves)
    for group in _groups(leaves):
        if len(group) == 1:
            number = group[0][3]
            tensor, recipes[number] = _alone(leaves[number], len(tensors))
        else:
            tensor = _hull(leaves, group, len(tensors), recipes)
        tensors.append(tensor)
    as_they_are = recipes == list(range(len(leaves)))
    layout = layout_of(
        tuple(map(_get_dtype, tensors)),
        tuple(map(_get_shape, tensors)),
        None if as_they_are else tuple(recipes),
    )
    return tensors, layout, [tensor.data_ptr() if tensor.is_contiguous() else 0 for tensor in tensors]


def _groups(leaves: list[Tensor]) -> list[list[_Piece]]:
    """The leaves by the memory that they share, each group in the order in which it lies there.

    The groups are in the order in which their first leaf was named.
    """
    pieces: list[_Piece] = []
    for number, leaf in enumerate(leaves):
        # Addresses on several devices may be equal.
        home = leaf.device.type, leaf.device.index or 0
        start = leaf.data_ptr()
        pieces.append((home, start, start + _extent(leaf) * leaf.itemsize, number))
    groups: list[list[_Piece]] = []
    group: list[_Piece] = []
    home, end = ("", 0), 0
    for piece in sorted(pieces):
        if piece[1] == piece[2]:
            groups.append([piece])
        elif piece[0] == home and piece[1] < end:
            group.append(piece)
            end = max(end, piece[2])
        else:
            group = [piece]
            home, end = piece[0], piece[2]
            groups.append(group)
    groups.sort(key=lambda group: min(piece[3] for piece in group))
    return groups


def _extent(tensor: Tensor) -> int:
    """Elements from the first in memory to the last."""
    if not tensor.numel():
        return 0
    return 1 + sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _alone(leaf: Tensor, slot: int) -> tuple[Tensor, Recipe]:
    """What to carry for a leaf whose memory no other leaf has a part of."""
    if leaf.is_contiguous():
        return leaf, slot
    shape, stride = tuple(leaf.shape), tuple(map(int, leaf.stride()))
    extent = _extent(leaf)
    if extent <= leaf.numel():
        # Without gaps: permuted, or the same value many times.
        return leaf.as_strided((extent,), (1,)), (slot, None, shape, stride, 0)
    core = leaf
    for dimension, step in enumerate(stride):
        if step == 0:
            core = core.narrow(dimension, 0, 1)
    if core.shape == leaf.shape:
        return leaf, slot
    seen = tuple(
        0 if step == 0 else one for step, one in zip(stride, contiguous_strides(core.shape), strict=True)
    )
    return core, (slot, None, shape, seen, 0)


def _hull(leaves: list[Tensor], group: list[_Piece], slot: int, recipes: list[Recipe]) -> Tensor:
    """The memory that all leaves of a group lie in, with what is between them."""
    members = [leaves[piece[3]] for piece in group]
    end = max(piece[2] for piece in group)
    # An array and a tensor of one memory have storages of their own: the widest has all of it.
    storage = max((member.untyped_storage() for member in members), key=lambda one: one.nbytes())
    start = storage.data_ptr()
    first = group[0][1]
    dtype = members[0].dtype
    if any(member.dtype != dtype for member in members):
        dtype = torch.uint8
        # Aligned in its storage, so that a view of any dtype that begins there does here. What is before the first
        # leaf may be carried with another leaf too.
        first = start + (first - start) // _WIDEST * _WIDEST
    for piece, member in zip(group, members, strict=True):
        other = None if member.dtype == dtype else member.dtype
        recipes[piece[3]] = (
            slot,
            other,
            tuple(member.shape),
            tuple(map(int, member.stride())),
            piece[1] - first,
        )
    length = (end - first) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=members[0].device).set_(
        storage, (first - start) // dtype.itemsize, (length,), (1,)
    )
