"""Tensors that are saved again and again, which need not be judged again while nothing about them changed.

Owns what was read of the tensors of the last saves. What always holds: no tensor is kept alive; facts are given only
where everything that they and the judgement of the tensors follow from was read again, and is equal: a tensor may
have got another shape, dtype or memory and still be the same object. Whether all of that memory is there, whoever
copies it looks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from tundish._native import TensorLook
from tundish.checkpoint.tensors import READER, Facts, are_of_torch

__all__ = ["MetadataCache", "facts_if_unchanged", "remember"]

T = TypeVar("T")

# What decides whether a tensor can be saved, and whether it is tied to another; that all are contiguous besides.
_ASKED: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.data_ptr,
    attrgetter("dtype"),
    attrgetter("shape"),
    torch.Tensor.storage_offset,
    lambda tensor: tensor.untyped_storage().nbytes(),
)


class _Look(NamedTuple):
    """What was seen of tensors, where torch has no words for many at once; equal where nothing of it changed."""

    names: tuple[str, ...]
    answers: list[list[Any]]

    @classmethod
    def at(cls, tensors: dict[str, torch.Tensor]) -> Self | None:
        """None where what is asked does not tell all."""
        values = tensors.values()
        if not are_of_torch(values) or not all(map(torch.Tensor.is_contiguous, values)):
            return None
        try:
            answers = [list(map(asked, values)) for asked in _ASKED]
        except RuntimeError:
            # One has no address: its layout is another now.
            return None
        # What is empty has no address, wherever it is.
        return cls(tuple(tensors), answers) if all(answers[0]) else None


# Of how many names something is kept.
_MOST = 4


class MetadataCache(Generic[T]):
    """What followed from the names of tensors, from what was seen of them, and from a key; of the last few names."""

    def __init__(self) -> None:
        self._kept: list[tuple[TensorLook | _Look, Hashable, T]] = []

    def find(self, tensors: dict[str, torch.Tensor], key: Hashable = None) -> T | None:
        """What was kept of these; None where anything is not as it was."""
        for look, known, what in self._kept:
            if known == key and _sees(look, tensors):
                return what
        return None

    def keep(self, tensors: dict[str, torch.Tensor], what: T, key: Hashable = None) -> None:
        """Keep `what`, where what is seen of the tensors tells all."""
        look = _Look.at(tensors) if READER is None else READER.look(tensors)
        if look is None:
            return
        others = [kept for kept in self._kept if kept[0].names != look.names]
        self._kept = [*others[-_MOST + 1 :], (look, key, what)]


_facts: MetadataCache[tuple[Facts, ...]] = MetadataCache()


def facts_if_unchanged(tensors: dict[str, torch.Tensor]) -> tuple[Facts, ...] | None:
    """What `remember` was told of them; None where something about one of them is not as it was."""
    return _facts.find(tensors)


def remember(tensors: dict[str, torch.Tensor], facts: tuple[Facts, ...]) -> None:
    """Take note of `tensors`: they can be saved, no two of them are tied, and `facts` are theirs."""
    _facts.keep(tensors, facts)


def _sees(look: TensorLook | _Look, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether `tensors` have the same names, in the same order, and are as they were."""
    if isinstance(look, TensorLook):
        return READER is not None and READER.sees(look, tensors)
    return look.names == tuple(tensors) and _Look.at(tensors) == look
