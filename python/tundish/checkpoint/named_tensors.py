"""Turns the argument of `save_hf` into named tensors: a module, a mapping of tensors, or a mapping of modules.

The names of wrappers (DataParallel, torch.compile, activation checkpointing) are removed. Names are distinct, printable
text and not paths to another folder. No tensor is copied.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tundish.errors import InvalidInputError, InvalidTypeError, format_type

__all__ = ["WRAPPERS", "NamedTensors", "check_name", "named_tensors", "refuse_repeated", "without_wrappers"]

# torch.compile and activation checkpointing put these into the paths of modules.
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module)\.")
# The child of DataParallel, DistributedDataParallel and similar wrappers.
_DATA_PARALLEL = "module"


@dataclass(frozen=True, kw_only=True)
class NamedTensors:
    """The tensors of one module of the input, or of a whole mapping of tensors.

    Attributes:
        prefix: the start of its names in the files; empty, or ends with a dot.
        module: without wrappers; None if tensors were given.
        tensors: by their names without the prefix.
    """

    prefix: str
    module: nn.Module | None
    tensors: dict[str, torch.Tensor]


def named_tensors(model_or_tensors: Any) -> list[NamedTensors]:
    """Return the tensors of each module of the input, or of the mapping.

    Raises:
        InvalidTypeError: it is no module and no mapping, or contains a value that is neither a tensor nor a module.
        InvalidInputError: it is empty, a name cannot be used, or two names are the same without wrappers.
    """
    if isinstance(model_or_tensors, nn.Module):
        inputs = [_named_of_module("", model_or_tensors)]
    elif isinstance(model_or_tensors, Mapping):
        given = dict(model_or_tensors.items())
        modules = [name for name, one in given.items() if isinstance(one, nn.Module)]
        if not modules:
            inputs = [NamedTensors(prefix="", module=None, tensors=_named(given))]
        elif len(modules) == len(given):
            inputs = [_named_of_module(prefix, module) for prefix, module in given.items()]
        else:
            raise InvalidTypeError(
                f"{modules[0]!r} is a module among tensors: give tensors by name, or modules by prefix"
            )
    else:
        raise InvalidTypeError(
            f"cannot save {format_type(model_or_tensors)}: give an nn.Module, a mapping of names to tensors, "
            "or a mapping of prefixes to modules"
        )
    if not any(model.tensors for model in inputs):
        raise InvalidInputError("there is nothing to save: the model has no tensors")
    if len(inputs) > 1:
        refuse_repeated(
            (model.prefix + name for model in inputs for name in model.tensors),
            "the name {!r} is there twice, under two prefixes: change one of them",
        )
    return inputs


def check_name(name: object) -> None:
    """Refuse a tensor name that is no string, is empty, or leads to another folder as a path."""
    if not isinstance(name, str):
        raise InvalidTypeError(f"the name of a tensor is {name!r}: names are strings")
    if not name or name == "__metadata__" or not name.isprintable():
        raise InvalidInputError(f"{name!r} cannot name a tensor: give printable text")
    if ".." in name or name[0] in "/\\" or name[1:3] in (":/", ":\\"):
        raise InvalidInputError(f"{name!r} cannot name a tensor: as a path it leads elsewhere")


def refuse_repeated(names: Iterable[str], message: str) -> None:
    """Raise `InvalidInputError` with `message`, formatted with the first name that is there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidInputError(message.format(name))
        seen.add(name)


def without_wrappers(module: nn.Module) -> nn.Module:
    """The module inside of wrappers."""
    children = dict(module.named_children())
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        if name in children:
            return without_wrappers(children[name])
    # Wrappers of other libraries have this child alone.
    if [*children] == [_DATA_PARALLEL]:
        return without_wrappers(children[_DATA_PARALLEL])
    return module


def _named_of_module(prefix: Any, module: nn.Module) -> NamedTensors:
    if not isinstance(prefix, str):
        raise InvalidTypeError(f"the prefix of a module is {prefix!r}: prefixes are strings")
    if prefix:
        check_name(prefix)
        prefix = prefix if prefix.endswith(".") else f"{prefix}."
    # The parameters themselves: a detached copy takes 50 µs for a DTensor.
    tensors = _named(dict(module.state_dict(keep_vars=True)))
    return NamedTensors(prefix=prefix, module=without_wrappers(module), tensors=tensors)


def _named(tensors: dict[Any, Any]) -> dict[str, torch.Tensor]:
    """Tensors by their names without wrappers."""
    names = _names_without_wrappers(tuple(tensors))
    for given, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidTypeError(
                f"{given!r} is {format_type(tensor)}, not a tensor: give the mapping of names to tensors without it"
            )
    return dict(zip(names, tensors.values(), strict=True))


# A training loop saves the same thousands of names again and again.
@functools.lru_cache(maxsize=8)
def _names_without_wrappers(names: tuple[Any, ...]) -> tuple[str, ...]:
    plain: list[str] = []
    for name in names:
        check_name(name)
        kept = WRAPPERS.sub("", name)
        while kept.startswith(f"{_DATA_PARALLEL}."):
            kept = kept.removeprefix(f"{_DATA_PARALLEL}.")
        check_name(kept)
        plain.append(kept)
    refuse_repeated(plain, "the name {!r} is there twice, once the names of wrappers are taken off")
    return tuple(plain)
