"""Tensors that are saved again and again, which need not be judged again while nothing about them changed.

Owns what was read of the tensors of the last saves. What always holds: no tensor is kept alive; facts are given only
where everything that they and the judgement of the tensors follow from was read again, and is equal: a tensor may
have got another shape, dtype or memory and still be the same object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter, eq
from typing import Any

import torch

from tundish.checkpoint.tensors import Facts, are_of_torch

__all__ = ["facts_if_unchanged", "remember"]

# What decides whether a tensor can be saved, and whether it is tied to another; that all are contiguous besides.
_ASKED: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.data_ptr,
    attrgetter("dtype"),
    attrgetter("shape"),
    torch.Tensor.storage_offset,
)


def facts_if_unchanged(tensors: Mapping[str, torch.Tensor]) -> tuple[Facts, ...] | None:
    """What `remember` was told of them; None where something about one of them is not as it was."""
    values = tensors.values()
    for facts, before in _last(tuple(tensors)):
        try:
            if _are_simple(values) and all(
                all(map(eq, then, now)) for then, now in zip(before, _looks(values), strict=True)
            ):
                return facts
        except RuntimeError:
            # One has no address: its layout is another now.
            return None
    return None


def remember(tensors: Mapping[str, torch.Tensor], facts: tuple[Facts, ...]) -> None:
    """Take note of `tensors`: they can be saved, no two of them are tied, and `facts` are theirs."""
    values = tensors.values()
    if not _are_simple(values):
        return
    before = list(map(list, _looks(values)))
    # What is empty has no address, wherever it is.
    if all(before[0]):
        _last(tuple(tensors))[:] = [(facts, before)]


def _are_simple(tensors: Collection[torch.Tensor]) -> bool:
    return are_of_torch(tensors) and all(map(torch.Tensor.is_contiguous, tensors))


def _looks(tensors: Collection[torch.Tensor]) -> Iterator[Iterator[Any]]:
    for asked in _ASKED:
        yield map(asked, tensors)
    yield map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))


@functools.lru_cache(maxsize=4)
def _last(names: tuple[str, ...]) -> list[tuple[tuple[Facts, ...], list[list[Any]]]]:  # noqa: ARG001 (the key)
    """The last that was remembered under these names, if anything was."""
    return []
