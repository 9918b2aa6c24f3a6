"""A state dict as a flat list of named values, and whether it fits a checkpoint.

Invariants:
    - Names are those of `torch.distributed.checkpoint`'s planner: keys as text, joined by dots. Keys of any type are
      found again in the state dict that is loaded into.
    - Nothing is copied, and no value of a tensor is read.
    - The structure of a state dict is compared completely, not by a digest.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tundish.checkpoint.tensors import check_name, check_tensor, local_of
from tundish.errors import InvalidInputError, InvalidTypeError, StateMismatchError, format_type

# The keys, and the places in lists, that lead to a value.
Keys = tuple[Any, ...]

_NEVER_STATEFUL = (torch.Tensor, dict)
_WITHOUT_SHAPE = (nn.UninitializedParameter, nn.UninitializedBuffer)


@dataclass(frozen=True, kw_only=True)
class StateStructure:
    """Everything about a state dict except its values.

    Attributes:
        paths: the name of each value to the keys and places in lists that lead to it.
        torch_paths: the same as torch's planner writes them: keys of mappings are text.
        parts: for each value its path and, for a tensor, everything that determines where its bytes lie.
    """

    paths: dict[str, Keys]
    torch_paths: list[tuple[str | int, ...]]
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
    paths, torch_paths, values = _flat(plain_state(state_dict))
    # Compared one by one: objects that die at once give the garbage collector nothing to traverse.
    if (
        known is not None
        and len(values) == len(known.parts)
        and all(map(operator.eq, map(_part_of, paths.values(), torch_paths, values), known.parts))
    ):
        return FlattenedState(structure=known, values=values)
    parts = list(map(_part_of, paths.values(), torch_paths, values))
    state = FlattenedState(
        structure=StateStructure(paths=paths, torch_paths=torch_paths, parts=parts), values=values
    )
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


def plain_state(state_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """`state_dict` with each stateful value replaced by its state, as DCP does."""
    return {name: value.state_dict() if is_stateful(value) else value for name, value in state_dict.items()}


def is_stateful(value: Any) -> bool:
    """Whether DCP saves the state of `value` in its place."""
    # Checking a protocol takes 20 µs, too long for thousands of tensors.
    return not isinstance(value, _NEVER_STATEFUL) and isinstance(value, Stateful)


def set_value(state: Any, path: Keys, value: Any) -> None:
    """Replace the value at `path`."""
    value_at(state, path[:-1])[path[-1]] = value


def value_at(state: Any, path: Keys) -> Any:
    """The value, or the part of the state dict, at `path`."""
    return functools.reduce(operator.getitem, path, state)


def check_can_set(state: Any, path: Keys) -> None:
    """Raise `InvalidTypeError` if the value at `path` cannot be replaced."""
    holder = value_at(state, path[:-1])
    if not hasattr(type(holder), "__setitem__"):
        raise InvalidTypeError(
            f"{'.'.join(map(str, path))!r} lies in {format_type(holder)}, which cannot be changed: give a dict"
        )


def _flat(state: dict[Any, Any]) -> tuple[dict[str, Keys], list[tuple[str | int, ...]], list[Any]]:
    """The paths of all values by name, their paths in torch's form, and the values."""
    if all(type(name) is str and isinstance(value, torch.Tensor) for name, value in state.items()):
        paths: dict[str, Keys] = {name: (name,) for name in state}
        return paths, list(paths.values()), list(state.values())
    paths = {}
    torch_paths: list[tuple[str | int, ...]] = []
    values: list[Any] = []
    nested: dict[int, bool] = {}

    def visit(path: Keys, torch_path: tuple[str | int, ...], value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit((*path, key), (*torch_path, str(key)), item)
        elif isinstance(value, list) and _is_nested(value, nested):
            for number, item in enumerate(value):
                visit((*path, number), (*torch_path, number), item)
        else:
            name = ".".join(map(str, torch_path))
            if name in paths:
                raise InvalidInputError(
                    f"two values of the state dict have the name {name!r}, under the keys {paths[name]} and {path}: "
                    "change one of them"
                )
            paths[name] = path
            torch_paths.append(torch_path)
            values.append(value)

    try:
        visit((), (), state)
    except RecursionError:
        raise InvalidInputError(
            "the state dict is nested without end, or a thousand levels deep: does a part of it contain itself?"
        ) from None
    return paths, torch_paths, values


def _is_nested(values: list[Any], known: dict[int, bool]) -> bool:
    """Whether a list has tensors or mappings in it, so that each item is a value of its own.

    `known` has the answers by id, because lists may share parts.
    """
    if id(values) not in known:
        known[id(values)] = any(
            isinstance(value, torch.Tensor | Mapping)
            or (isinstance(value, list) and _is_nested(value, known))
            for value in values
        )
    return known[id(values)]


def _part_of(path: Keys, torch_path: tuple[str | int, ...], tensor: Any) -> Hashable:
    if not isinstance(tensor, torch.Tensor):
        return path, torch_path
    # The type counts too, so that one checked tensor may stand for another.
    kind, dtype, layout = type(tensor), tensor.dtype, tensor.layout
    if not isinstance(tensor, DTensor):
        # Nested and uninitialized tensors, which are refused later, have no shape.
        has_shape = not tensor.is_nested and not isinstance(tensor, _WITHOUT_SHAPE)
        return path, torch_path, kind, dtype, layout, tensor.is_meta, tensor.shape if has_shape else None
    local = local_of(tensor)
    of_local = type(local), local.is_meta, local.layout, local.shape
    return (
        path,
        torch_path,
        kind,
        dtype,
        layout,
        tensor.shape,
        tensor.placements,
        tensor.device_mesh,
        of_local,
    )


_MOST_NAMED = 5
# Values that torch's optimizers give the state of a parameter at its first gradient, by their names.
_AT_FIRST: dict[str, int | str] = {
    **dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"), 0
    ),
    **dict.fromkeys(("grad_avg", "acc_delta", "prev", "ax", "row_var", "col_var", "variance"), 0),
    "mu": 1,
    "mu_product": 1,
    # The learning rate of the parameter.
    "eta": "lr",
    "step_size": "lr",
}


@dataclass(frozen=True, kw_only=True)
class AbsentState:
    """The optimizer state of one parameter that the checkpoint does not have.

    Attributes:
        parameter: as the optimizer's state dict names it.
        names: of the values in the state dict that is loaded into.
        entry: the mapping of the values; None where it holds those of other parameters too.
        group: prefix of the names of the parameter's settings; used if `entry` is None.
    """

    parameter: Any
    names: frozenset[str]
    entry: dict[Any, Any] | None
    group: str

    def reset(self, state: FlattenedState, target: Any) -> None:
        """Make the state what it was when it was saved: that of a parameter that never got a gradient."""
        if self.entry is not None:
            # An optimizer makes the state of a parameter that has none at its first gradient.
            self.entry.clear()
            return
        for name, value in state:
            if name not in self.names:
                continue
            first = _AT_FIRST[name.rpartition(".")[2]]
            number = (
                value_at(target, state.structure.paths[self.group + first])
                if isinstance(first, str)
                else first
            )
            if isinstance(value, torch.Tensor):
                value.detach().fill_(number)
            else:
                set_value(target, state.structure.paths[name], type(value)(number))


def absent_states(
    target: Any, state: FlattenedState, saved: Collection[str], read_object: Callable[[str], Any]
) -> list[AbsentState]:
    """The parameters in `target` that had no state in an optimizer when it was saved.

    Args:
        target: the state dict that is loaded into, nested.
        state: the same, flattened.
        saved: the names of all values in the checkpoint.
        read_object: returns a saved value that is no tensor.
    """
    paths = state.structure.paths
    groups: dict[tuple[Keys, Any], set[str]] = {}
    for name, path in paths.items():
        if (place := _parameter_of(target, path)) is not None:
            groups.setdefault(place, set()).add(name)
    absent = []
    for (outer, parameter), names in groups.items():
        if any(name in saved for name in names):
            continue
        prefix = "".join(f"{key}." for key in outer)
        optimizer, group = value_at(target, outer), f"{prefix}param_groups.{parameter}."
        if "state" in optimizer:
            lists = _parameter_lists(prefix, saved)
            is_known, entry = (
                any(parameter in read_object(name) for name in lists),
                optimizer["state"][parameter],
            )
        else:
            values = {name.rpartition(".")[2] for name in names}
            entry = None
            is_known = values <= _AT_FIRST.keys() and any(name.startswith(group) for name in saved)
            # torch's SGD takes the first gradient whole, which no buffer does.
            if "momentum_buffer" in values and optimizer.get(f"param_groups.{parameter}.dampening"):
                is_known = False
        # A parameter that the saved optimizer does not know was renamed, or is new: that is a mismatch.
        if is_known:
            absent.append(AbsentState(parameter=parameter, names=frozenset(names), entry=entry, group=group))
    return absent


def _parameter_lists(prefix: str, saved: Collection[str]) -> list[str]:
    """The names of the lists of parameters of an optimizer's groups."""
    lists: list[str] = []
    while (name := f"{prefix}param_groups.{len(lists)}.params") in saved:
        lists.append(name)
    return lists


def _parameter_of(state: Any, path: Keys) -> tuple[Keys, Any] | None:
    """The path of an optimizer's state dict and the parameter whose state has a value at `path`; None elsewhere.

    An optimizer's state dict is nested, or flat as torch's `flatten_optimizer_state_dict` makes it.
    """
    for number, key in enumerate(path):
        is_last = number == len(path) - 1
        if key == "state" and not is_last and isinstance(state, Mapping) and "param_groups" in state:
            return path[:number], path[number + 1]
        if is_last and isinstance(key, str) and key.startswith("state."):
            parameter = key.removeprefix("state.").rpartition(".")[0]
            return (path[:number], parameter) if parameter else None
        state = state[key]
    return None


def check_fit(values: Mapping[str, Any], metadata: Metadata, path: Path) -> None:
    """Compare names, kinds, shapes and dtypes of `values` with those of the checkpoint at `path`.

    Raises:
        StateMismatchError: the checkpoint lacks a value, or the value in the state dict cannot hold it.
    """
    saved = metadata.state_dict_metadata
    problems = []
    for name, value in values.items():
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
            "it was saved, or remove the values that you do not want to load"
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
