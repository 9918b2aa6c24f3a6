"""Batches whose tensors are as those of an earlier one.

Owns the memory of a structure for the dtypes and shapes that it was met with. What always holds: tensors are
recognised only if all of them are plain, contiguous, and of the dtypes and shapes of one layout; that nobody
recognises them costs time only.

To ask a tensor for its dtype, shape, strides and flags one after the other takes longer than all the rest of `flatten`.
torch has a comparison of many tensors at once, which its compiler uses to know inputs again. It is not promised to
anybody: what it tells apart is tried when this module is imported, and without it every tensor is asked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tundish.tree.layout import Layout

__all__ = ["Recent"]

# A structure may come with a few shapes in turn.
_MOST: Final = 4

_get_requires_grad = operator.attrgetter("requires_grad")
_Check = Callable[..., bool]


class Recent:
    """The layouts that leaves came in lately, the last one first."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[tuple[int, _Check, Layout]] = []

    def layout_of(self, leaves: list[Tensor]) -> Layout | None:
        """The layout of these leaves, if all are plain and it is known."""
        known = self._known
        for place, entry in enumerate(known):
            count, check, layout = entry
            # Without gradients torch takes no notice of who requires one.
            if (
                count == len(leaves)
                and check(*leaves)
                and (torch.is_grad_enabled() or not any(map(_get_requires_grad, leaves)))
            ):
                if place:
                    self._known = [entry, *(other for other in known if other is not entry)]
                return layout
        return None

    def remember(self, leaves: list[Tensor], layout: Layout) -> None:
        """These leaves are plain and contiguous and have this layout, which may come again."""
        if _make_check is not None and leaves:
            entry = len(leaves), _make_check(leaves), layout
            self._known = [entry, *(other for other in self._known if other[2] is not layout)][:_MOST]


def _find_check() -> Callable[[list[Tensor]], _Check] | None:
    """What makes a function that compares tensors with these, if this torch has it and it tells apart what matters."""

    def make(leaves: list[Tensor]) -> _Check:
        guards = torch._C._dynamo.guards.TensorGuards(
            *leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        check: _Check = guards.check
        return check

    try:
        with torch.inference_mode(False), torch.enable_grad():
            one = torch.zeros(2, 3)
            same = [torch.zeros(2, 3), torch.zeros(4, 3)[2:]]
            others: list[Any] = [
                torch.zeros(2, 3, requires_grad=True),
                torch.nn.Parameter(one),
                torch.zeros(2, 3, dtype=torch.int32),
                torch.zeros(3, 2),
                torch.zeros(3, 2).t(),
                torch.zeros(6),
                torch._neg_view(one),
                torch.zeros(2, 3, device="meta"),
                one.to_sparse(),
            ]
            check = make([one, one])
            tells = all(check(each, one) and check(one, each) for each in same)
            tells = tells and not any(check(each, one) or check(one, each) for each in others)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return make if tells else None


_make_check = _find_check()
