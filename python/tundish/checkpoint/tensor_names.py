"""Turns the argument of `save_hf` into named tensors: a module, a mapping of tensors, or a mapping of modules.

The names of wrappers (DataParallel, torch.compile, activation checkpointing) are taken off. Names are distinct,
printable text that is no path to elsewhere. Nothing is copied.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tundish.checkpoint.tensors import are_of_torch
from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["Part", "check_name", "parts_of", "without_wrappers"]

# Of DataParallel and DistributedDataParallel, of torch.compile, of torch's activation checkpointing.
_DATA_PARALLEL = "module"
_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")
_MAY_BE_WRAPPED = re.compile("|".join([_DATA_PARALLEL, *_TRANSPARENT]))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One module of the input, or all of a mapping.

    `prefix`: what its names begin with in the files; empty, or ends with a dot. `module`: without wrappers; None where
    tensors were given. `tensors`: names, without the prefix, to tensors.
    """

    prefix: str
    module: nn.Module | None
    tensors: dict[str, torch.Tensor]


def parts_of(model_or_tensors: Any) -> list[Part]:
    """Take the input apart.

    Raises:
        InvalidTypeError: it is something else, or holds what is neither tensor nor module; the name is given.
        InvalidInputError: it is empty, a name cannot be used, or two names are the same once wrappers are taken off.
    """
    if isinstance(model_or_tensors, nn.Module):
        parts = [_part_of_module("", model_or_tensors)]
    elif isinstance(model_or_tensors, Mapping):
        given = dict(model_or_tensors.items())
        is_of_tensors = are_of_torch(given.values())
        modules = [] if is_of_tensors else [name for name, one in given.items() if isinstance(one, nn.Module)]
        if not modules:
            parts = [Part(prefix="", module=None, tensors=_named(given))]
        elif len(modules) == len(given):
            parts = [_part_of_module(prefix, module) for prefix, module in given.items()]
        else:
            raise InvalidTypeError(
                f"{modules[0]!r} is a module among tensors: give tensors by name, or modules by prefix"
            )
    else:
        raise InvalidTypeError(
            f"cannot save a {type(model_or_tensors).__name__}: give an nn.Module, a mapping of names to tensors, "
            "or a mapping of prefixes to modules"
        )
    if not any(part.tensors for part in parts):
        raise InvalidInputError("there is nothing to save: the model has no tensors")
    if len(parts) > 1:
        _refuse_same(part.prefix + name for part in parts for name in part.tensors)
    return parts


def check_name(name: object) -> None:
    """Refuse a tensor's name that is no string, is empty, or could lead somewhere when it is taken for a path."""
    if not isinstance(name, str):
        raise InvalidTypeError(f"the name of a tensor is {name!r}: names are strings")
    if not name or name == "__metadata__" or not name.isprintable():
        raise InvalidInputError(f"{name!r} cannot name a tensor: give printable text")
    if ".." in name or name[0] in "/\\" or name[1:3] in (":/", ":\\"):
        raise InvalidInputError(f"{name!r} cannot name a tensor: as a path it leads elsewhere")


def _part_of_module(prefix: Any, module: nn.Module) -> Part:
    if not isinstance(prefix, str):
        raise InvalidTypeError(f"the prefix of a module is {prefix!r}: prefixes are strings")
    if prefix:
        check_name(prefix)
        prefix = prefix if prefix.endswith(".") else f"{prefix}."
    # The parameters themselves and no detached copies: 50 µs apiece where they are DTensors.
    tensors = _named(dict(module.state_dict(keep_vars=True)), module)
    if prefix:
        for name in tensors:
            check_name(prefix + name)
    return Part(prefix=prefix, module=without_wrappers(module), tensors=tensors)


def _named(tensors: dict[Any, Any], module: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Tensors by their names without wrappers; `module`: where they come from."""
    if are_of_torch(tensors.values()) and _are_plain(tuple(tensors)):
        return tensors
    named: dict[str, torch.Tensor] = {}
    for given, tensor in tensors.items():
        check_name(given)
        name = given
        if _MAY_BE_WRAPPED.search(given):
            name = _without_wrapper_names(given, module)
            # What is left may be nothing, or lead elsewhere.
            check_name(name)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidTypeError(
                f"{given!r} is a {type(tensor).__name__}, not a tensor: give the mapping of names to tensors without it"
            )
        if name in named:
            raise InvalidInputError(
                f"the name {name!r} is there twice: {given!r} has it too, once the names of wrappers are taken off"
            )
        named[name] = tensor
    return named


# A training loop saves the same tensors again and again, and with thousands of them this costs milliseconds.
@functools.lru_cache(maxsize=8)
def _are_plain(names: tuple[Any, ...]) -> bool:
    """Whether all can be used as they are; where not, each is looked at by itself."""
    for name in names:
        try:
            check_name(name)
        except (InvalidInputError, InvalidTypeError):
            return False
    return not any(map(_MAY_BE_WRAPPED.search, names))


def _without_wrapper_names(name: str, module: nn.Module | None) -> str:
    kept: list[str] = []
    *path, leaf = name.split(".")
    for word in path:
        if word == _DATA_PARALLEL and kept:
            # A model may have a child of this name that is no wrapper's; in front of everything it always is one.
            is_wrapper = _is_data_parallel(module)
        else:
            is_wrapper = word == _DATA_PARALLEL or word in _TRANSPARENT
        if not is_wrapper:
            kept.append(word)
        module = getattr(module, word, None)
    return ".".join([*kept, leaf])


def _is_data_parallel(module: nn.Module | None) -> bool:
    return isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)


def without_wrappers(module: nn.Module) -> nn.Module:
    """The module that wrappers were put around."""
    children = dict(module.named_children())
    # Of other libraries' wrappers that is the only child; their names are taken off above.
    is_alone = [*children] == [_DATA_PARALLEL]
    names = (_DATA_PARALLEL,) if is_alone or _is_data_parallel(module) else _TRANSPARENT
    for name in names:
        if name in children:
            return without_wrappers(children[name])
    return module


def _refuse_same(names: Iterator[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidInputError(
                f"the name {name!r} is there twice, under two prefixes: change one of them"
            )
        seen.add(name)
