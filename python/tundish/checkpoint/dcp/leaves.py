"""A state dict as the flat list of what is in it.

Owns which values are taken, under which names, and what makes two state dicts alike. What always holds: names and
paths are those that `torch.distributed.checkpoint`'s planner gives; nothing is copied, no value of a tensor is looked
at; the form of a state dict, everything but its values, is compared whole and never by a digest.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tundish.checkpoint.tensor_names import check_name
from tundish.checkpoint.tensors import check_tensor, local_of
from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["Form", "Leaves", "is_stateful", "leaves_of", "plain_state"]

_NEVER_STATEFUL = (torch.Tensor, dict)
_WITHOUT_SHAPE = (nn.UninitializedParameter, nn.UninitializedBuffer)


@dataclass(frozen=True, kw_only=True)
class Form:
    """All of a state dict but its values.

    `paths`: the name of each leaf to the keys that lead to it. `parts`: of each leaf its path and, for a tensor,
    everything that decides where its bytes lie.
    """

    paths: dict[str, tuple[str | int, ...]]
    parts: list[Hashable]


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """The values of a state dict, in the order of its `form`: tensors, DTensors, other objects."""

    form: Form
    values: list[Any]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(self.form.paths, self.values, strict=True)


def leaves_of(state_dict: Any, known: Form | None = None) -> Leaves:
    """The leaves of `state_dict`; their form is `known`, and not checked again, where it is no other.

    Whether a tensor still has all of its memory, which may have been freed or cut since, is not seen in a form.

    Raises:
        InvalidTypeError: it is no mapping, or holds a tensor that has no dense values of its own or a dtype that DCP
            does not write.
        InvalidInputError: it is empty, holds a tensor without values, or has a name that cannot be used.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidTypeError(
            f"the state dict is a {type(state_dict).__name__}: give a mapping of names to values"
        )
    paths, values = _flat(plain_state(state_dict))
    # One after the other, since what is thrown away at once gives the garbage collector nothing to look through.
    if (
        known is not None
        and len(values) == len(known.parts)
        and all(map(operator.eq, map(_part_of, paths.values(), values), known.parts))
    ):
        return Leaves(form=known, values=values)
    parts = list(map(_part_of, paths.values(), values))
    leaves = Leaves(form=Form(paths=paths, parts=parts), values=values)
    if not values:
        raise InvalidInputError("there is nothing to save: the state dict is empty")
    for name, value in leaves:
        check_name(name)
        if isinstance(value, torch.Tensor):
            check_tensor(name, value)
            if not _has_known_size(value.dtype):
                raise InvalidTypeError(
                    f"{name!r} is {str(value.dtype).removeprefix('torch.')}, which torch.distributed.checkpoint cannot "
                    "write: save it as whole numbers, with tensor.view(torch.uint8) or one as wide"
                )
    return leaves


@functools.cache
def _has_known_size(dtype: torch.dtype) -> bool:
    """Whether DCP's planner, which asks this of every tensor when all is staged, has an answer."""
    try:
        torch._utils._element_size(dtype)  # type: ignore[no-untyped-call]  # torch leaves it so
    except TypeError:
        return False
    return True


def plain_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict` with the states of those of its values that are stateful in their place, as DCP takes it."""
    for name in state_dict:
        if not isinstance(name, str):
            raise InvalidTypeError(f"{name!r} names a value of the state dict: names are strings")
    return {name: value.state_dict() if is_stateful(value) else value for name, value in state_dict.items()}


def is_stateful(value: Any) -> bool:
    """Whether `value` has a state of its own, that is saved in its place."""
    # To ask a protocol takes 20 µs, which thousands of tensors need not.
    return not isinstance(value, _NEVER_STATEFUL) and isinstance(value, Stateful)


def _flat(state: dict[str, Any]) -> tuple[dict[str, tuple[str | int, ...]], list[Any]]:
    """The paths of all leaves by name, and the leaves."""
    if all(type(name) is str and isinstance(value, torch.Tensor) for name, value in state.items()):
        # As the planner would have it, which goes through thousands of tensors for milliseconds.
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
    # What a tensor is made of counts too, so that one that was checked may stand for another.
    kind, dtype, layout = type(tensor), tensor.dtype, tensor.layout
    if not isinstance(tensor, DTensor):
        # One that is refused later, nested or uninitialized, has no shape.
        has_shape = not tensor.is_nested and not isinstance(tensor, _WITHOUT_SHAPE)
        return path, kind, dtype, layout, tensor.is_meta, tensor.shape if has_shape else None
    local = local_of(tensor)
    of_local = type(local), local.is_meta, local.layout, local.shape
    return path, kind, dtype, layout, tensor.shape, tensor.placements, tensor.device_mesh, of_local
