"""Checks that a state dict fits a checkpoint, before anything is loaded into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from tundish.checkpoint.dcp.flattened_state import FlattenedState
from tundish.errors import StateMismatchError

__all__ = ["check_fit", "empty_mappings"]

_MOST_NAMED = 5


def check_fit(state: FlattenedState, metadata: Metadata, path: Path) -> None:
    """Compare names, kinds, shapes and dtypes of `state` with those of the checkpoint at `path`.

    Raises:
        StateMismatchError: a value is not in the checkpoint, or cannot hold what is.
    """
    saved = metadata.state_dict_metadata
    problems = []
    for name, value in state:
        there = saved.get(name)
        if there is None:
            problems.append(f"{name!r} is not in it")
        elif isinstance(value, torch.Tensor) is not isinstance(there, TensorStorageMetadata):
            kinds = (
                ("a tensor", "no tensor") if isinstance(value, torch.Tensor) else ("no tensor", "a tensor")
            )
            problems.append(f"{name!r} is {kinds[0]} here and {kinds[1]} in it")
        elif isinstance(there, TensorStorageMetadata) and tuple(there.size) != tuple(value.shape):
            problems.append(f"{name!r} has shape {tuple(value.shape)} here and {tuple(there.size)} in it")
        elif isinstance(there, TensorStorageMetadata):
            problems.extend(f"{name!r} {problem}" for problem in _misfits(value, there.properties.dtype))
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise StateMismatchError(
            f"the state dict does not fit the checkpoint {path}: {'; '.join(problems[:_MOST_NAMED])}{more}. Give it as "
            "it was saved, or leave out what is not to be loaded"
        )


def empty_mappings(state: Mapping[str, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of keys to the empty mappings in `state`."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            if not value:
                yield (*path, key)
            yield from empty_mappings(value, (*path, key))


def _misfits(tensor: torch.Tensor, saved: torch.dtype) -> Iterator[str]:
    """Why values of dtype `saved` cannot be copied into `tensor` without losing their meaning."""
    if _number_kind(saved) > _number_kind(tensor.dtype) or _is_narrower(tensor.dtype, saved):
        yield f"is {tensor.dtype} here and {saved} in it, which it cannot hold"
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_dense = local.layout is torch.strided
    if is_dense and any(
        step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True)
    ):
        yield "is expanded here, so that its elements share memory: give a clone() of it"


def _number_kind(dtype: torch.dtype) -> int:
    """Booleans, integers, floats, complex numbers: each kind can hold those before it, except for rounding."""
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _is_narrower(here: torch.dtype, saved: torch.dtype) -> bool:
    """Whether integers of dtype `saved` can be out of range of `here`, where torch would wrap them around."""
    # Only integers have `iinfo`.
    if saved is here or _number_kind(saved) != 1 or _number_kind(here) != 1:
        return False
    there, own = torch.iinfo(saved), torch.iinfo(here)
    return there.min < own.min or there.max > own.max
