"""Tensors that are saved again and again, which need not be judged again while nothing about them changed.

Owns what was read of the tensors of the last saves. What always holds: no tensor is kept alive; facts are given only
where everything that they and the judgement of the tensors follow from was read again, and is equal: a tensor may
have got another shape, dtype or memory and still be the same object.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Mapping
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch

from tundish._native import TensorLook
from tundish.checkpoint.tensors import READER, Facts, are_of_torch

__all__ = ["Unchanged", "facts_if_unchanged", "remember"]

T = TypeVar("T")

# Where torch has no words for many tensors at once: what decides whether one can be saved, and whether it is tied to
# another; that all are contiguous besides.
_ASKED: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.data_ptr,
    attrgetter("dtype"),
    attrgetter("shape"),
    torch.Tensor.storage_offset,
)

# What was seen of tensors; equal where nothing of it changed.
_Look = TensorLook | list[list[Any]]

# Of how many names something is kept.
_MOST = 4


class Unchanged(Generic[T]):
    """What followed from the names of tensors, from what was seen of them, and from a key; of the last few names."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[tuple[str, ...], tuple[_Look, Hashable, T]] = (
            collections.OrderedDict()
        )

    def find(self, tensors: Mapping[str, torch.Tensor], key: Hashable = None) -> T | None:
        """What was kept of these; None where anything is not as it was."""
        kept = self._kept.get(tuple(tensors))
        if kept is None or kept[1] != key or kept[0] != _look(list(tensors.values())):
            return None
        return kept[2]

    def keep(self, tensors: Mapping[str, torch.Tensor], what: T, key: Hashable = None) -> None:
        """Keep `what`, where what is seen of the tensors tells all."""
        look = _look(list(tensors.values()))
        if look is None:
            return
        names = tuple(tensors)
        self._kept[names] = (look, key, what)
        self._kept.move_to_end(names)
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)


_facts: Unchanged[tuple[Facts, ...]] = Unchanged()


def facts_if_unchanged(tensors: Mapping[str, torch.Tensor]) -> tuple[Facts, ...] | None:
    """What `remember` was told of them; None where something about one of them is not as it was."""
    return _facts.find(tensors)


def remember(tensors: Mapping[str, torch.Tensor], facts: tuple[Facts, ...]) -> None:
    """Take note of `tensors`: they can be saved, no two of them are tied, and `facts` are theirs."""
    _facts.keep(tensors, facts)


def _look(tensors: list[torch.Tensor]) -> _Look | None:
    """None where what is asked does not tell all."""
    if READER is not None:
        return READER.look(tensors)
    if not are_of_torch(tensors) or not all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    try:
        looks = [list(map(asked, tensors)) for asked in _ASKED]
        looks.append(list(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))))
    except RuntimeError:
        # One has no address: its layout is another now.
        return None
    # What is empty has no address, wherever it is.
    return looks if all(looks[0]) else None
