"""A state dict as a flat list of named values, and whether it fits a checkpoint.

Invariants:
    - Names are those of `torch.distributed.checkpoint`'s planner.
    - Nothing is copied, and no value of a tensor is read.
    - The structure of a state dict is compared completely, not by a digest.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tundish.checkpoint.tensors import check_name, check_tensor, local_of
from tundish.errors import InvalidInputError, InvalidTypeError, StateMismatchError, format_type

_NEVER_STATEFUL = (torch.Tensor, dict)
_WITHOUT_SHAPE = (nn.UninitializedParameter, nn.UninitializedBuffer)


@dataclass(frozen=True, kw_only=True)
class StateStructure:
    """Everything about a state dict except its values.

    Attributes:
        paths: the name of each value to the keys that lead to it.
        parts: for each value its path and, for a tensor, everything that determines where its bytes lie.
    """

    paths: dict[str, tuple[str | int, ...]]
    parts: list[Hashable]


@dataclass(frozen=True, kw_only=True)
class FlattenedState:
    """The values of a state dict, in the order of its `structure`: tensors, DTensors and other objects."""

    structure: StateStructure
    values: list[Any]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(self.structure.paths, self.values, strict=True)


def flatten_state(state_dict: Any, known: StateStructure | None = None) -> FlattenedState:
    """Flatten `state_dict`; if its structure equals `known`, use that and do not check the values again.

    A structure does not show whether the memory of a tensor was freed or cut since.

    Raises:
        InvalidTypeError: it is no mapping, or contains a tensor without dense values of its own, or of a dtype that
            DCP does not write.
        InvalidInputError: it is empty, contains a tensor without values, or has an invalid name.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidTypeError(
            f"the state dict is {format_type(state_dict)}: give a mapping of names to values"
        )
    paths, values = _flat(plain_state(state_dict))
    # Compared one by one: objects that die at once give the garbage collector nothing to traverse.
    if (
        known is not None
        and len(values) == len(known.parts)
        and all(map(operator.eq, map(_part_of, paths.values(), values), known.parts))
    ):
        return FlattenedState(structure=known, values=values)
    parts = list(map(_part_of, paths.values(), values))
    state = FlattenedState(structure=StateStructure(paths=paths, parts=parts), values=values)
    if not values:
        raise InvalidInputError("there is nothing to save: the state dict is empty")
    for name, value in state:
        check_name(name)
        if isinstance(value, torch.Tensor):
            check_tensor(name, value)
            if not _has_known_size(value.dtype):
                raise InvalidTypeError(
                    f"{name!r} is {str(value.dtype).removeprefix('torch.')}, which torch.distributed.checkpoint cannot "
                    "write: save it as whole numbers, with tensor.view(torch.uint8) or one as wide"
                )
    return state


@functools.cache
def _has_known_size(dtype: torch.dtype) -> bool:
    """Whether DCP's planner, which asks this for every tensor after staging, has an answer."""
    try:
        torch._utils._element_size(dtype)  # type: ignore[no-untyped-call]  # torch leaves it so
    except TypeError:
        return False
    return True


def plain_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict` with each stateful value replaced by its state, as DCP does."""
    for name in state_dict:
        if not isinstance(name, str):
            raise InvalidTypeError(f"{name!r} names a value of the state dict: names are strings")
    return {name: value.state_dict() if is_stateful(value) else value for name, value in state_dict.items()}


def is_stateful(value: Any) -> bool:
    """Whether DCP saves the state of `value` in its place."""
    # Checking a protocol takes 20 µs, too long for thousands of tensors.
    return not isinstance(value, _NEVER_STATEFUL) and isinstance(value, Stateful)


def _flat(state: dict[str, Any]) -> tuple[dict[str, tuple[str | int, ...]], list[Any]]:
    """The paths of all values by name, and the values."""
    if all(type(name) is str and isinstance(value, torch.Tensor) for name, value in state.items()):
        # The planner gives the same, but takes milliseconds for thousands of tensors.
        return {name: (name,) for name in state}, list(state.values())
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    try:
        planner.set_up_planner(state)
    except ValueError as error:
        raise InvalidInputError(f"two values of the state dict have one name: {error}") from error
    except RecursionError:
        raise InvalidInputError(
            "the state dict is nested without end, or a thousand levels deep: does a part of it contain itself?"
        ) from None
    return planner.mappings, list(planner.state_dict.values())


def _part_of(path: tuple[str | int, ...], tensor: Any) -> Hashable:
    if not isinstance(tensor, torch.Tensor):
        return path
    # The type counts too, so that one checked tensor may stand for another.
    kind, dtype, layout = type(tensor), tensor.dtype, tensor.layout
    if not isinstance(tensor, DTensor):
        # Nested and uninitialized tensors, which are refused later, have no shape.
        has_shape = not tensor.is_nested and not isinstance(tensor, _WITHOUT_SHAPE)
        return path, kind, dtype, layout, tensor.is_meta, tensor.shape if has_shape else None
    local = local_of(tensor)
    of_local = type(local), local.is_meta, local.layout, local.shape
    return path, kind, dtype, layout, tensor.shape, tensor.placements, tensor.device_mesh, of_local


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
