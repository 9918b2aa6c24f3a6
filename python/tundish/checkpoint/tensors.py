"""The tensors that a save takes: their names, and whether they can be saved.

Names come from a module, a mapping of tensors or a mapping of modules, without those of wrappers (DataParallel,
torch.compile, activation checkpointing). They are distinct, printable text and not paths to another folder.

Invariants:
    - Checks read shapes, dtypes, layouts and addresses, never values, and copy nothing.
    - Ranks with other parts of the same tensors get the same results.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tundish._native import TensorInspector
from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.tensor_bytes import extent

_logger = logging.getLogger("tundish.checkpoint")

# Name, shape, dtype.
TensorSpec = tuple[str, tuple[int, ...], torch.dtype]

# The names of dtypes in a file, in the order in which safetensors lays tensors out: larger alignment first, so that
# no tensor needs padding.
DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): code
    for name, code in (
        ("uint64", "U64"),
        ("int64", "I64"),
        ("float64", "F64"),
        ("complex64", "C64"),
        ("float32", "F32"),
        ("uint32", "U32"),
        ("int32", "I32"),
        ("bfloat16", "BF16"),
        ("float16", "F16"),
        ("uint16", "U16"),
        ("int16", "I16"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e8m0fnu", "F8_E8M0"),
        ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"),
        ("int8", "I8"),
        ("uint8", "U8"),
        ("bool", "BOOL"),
    )
    # The smallest floats are younger than the oldest torch that is supported.
    if hasattr(torch, name)
}

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)

# Looks at thousands of tensors in Rust. None before torch 2.10.
INSPECTOR = TensorInspector.of(list(_PLAIN), torch.UntypedStorage)


def any_on_cuda(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor is on a CUDA device."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it so
    return is_used and any(tensor.is_cuda for tensor in tensors)


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is a DTensor; imports nothing."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself; no copy. Waits for a part that other ranks still send.

    Unlike `DTensor.to_local` it leaves gradients alone and makes no parameters, which takes milliseconds for thousands
    of tensors.
    """
    if not is_dtensor(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    if type(local) not in _PLAIN:
        collectives = sys.modules.get("torch.distributed._functional_collectives")
        if collectives is not None and isinstance(local, collectives.AsyncCollectiveTensor):
            local = local.wait()
    return local  # type: ignore[no-any-return]


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`local_of` each."""
    return [tensor if type(tensor) in _PLAIN else local_of(tensor) for tensor in tensors]


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Names, shapes (of the whole tensors) and dtypes."""
    return tuple([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether `dtype` is a float of at most eight bits, which means nothing without its scales."""
    return dtype.itemsize == 1 and dtype.is_floating_point


def check_tensors(prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """`check_tensor` each; their names follow `prefix`."""
    named = list(tensors.items())
    for number in _unusual(list(tensors.values())):
        check_tensor(prefix + named[number][0], named[number][1])


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no values here, or values that no file can contain.

    Raises:
        InvalidTypeError: sparse, quantized, nested or another subclass of tensors.
        InvalidInputError: on the meta device, freed, sharded by DeepSpeed, or a DTensor whose values are yet to be
            reduced.
    """
    if type(tensor) not in _PLAIN:
        _check_subclass(name, tensor)
    if tensor.layout is not torch.strided:
        raise InvalidTypeError(f"{name!r} is {_short(tensor.layout)}: save it dense, with tensor.to_dense()")
    if tensor.is_nested:
        raise InvalidTypeError(f"{name!r} is nested: save its tensors under names of their own")
    if tensor.is_meta:
        raise InvalidInputError(f"{name!r} is on the meta device and has no values: materialize it first")
    if tensor.is_quantized:
        raise InvalidTypeError(f"{name!r} is quantized ({_short(tensor.dtype)}): save tensor.dequantize()")
    check_gathered(name, tensor)
    check_memory(name, tensor)


def check_gathered(name: str, tensor: torch.Tensor) -> None:
    """Refuse a parameter that DeepSpeed's ZeRO-3 has sharded: it is empty here. Raises `InvalidInputError`."""
    # DeepSpeed writes onto a parameter how many values the whole of it has.
    is_marked = hasattr(tensor, "ds_id") and getattr(tensor, "ds_numel", 0) > 0
    if is_marked and tensor.numel() == 0:
        raise InvalidInputError(
            f"{name!r} is sharded by DeepSpeed (ZeRO-3) and has no values here: gather it first, with "
            "deepspeed.zero.GatheredParameters, or use DeepSpeed's own save"
        )


def check_memories(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """`check_memory` each."""
    for number in _unusual(tensors):
        check_memory(names[number], tensors[number])


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose storage ends before it does, since reading it crashes. Raises `InvalidInputError`."""
    if is_dtensor(tensor) or tensor.numel() == 0:
        return
    end = (tensor.storage_offset() + extent(tensor)) * tensor.itemsize
    if end > tensor.untyped_storage().nbytes():
        raise InvalidInputError(
            f"{name!r} has no values: its storage of {tensor.untyped_storage().nbytes()} bytes was freed or cut, as "
            "wrappers do that shard parameters; save it where it is whole, or what the wrapper gives as state dict"
        )


def tied_names(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups of at least two names of the same view of the same memory, in the input's order.

    Views of one memory that overlap or lie side by side are separate tensors.
    """
    addresses = [tensor.data_ptr() for tensor in locals_of(tensors.values())]
    if len(set(addresses)) == len(addresses):
        return []
    by_address: dict[int, list[str]] = {}
    for name, address in zip(tensors, addresses, strict=True):
        by_address.setdefault(address, []).append(name)
    groups: dict[Hashable, list[str]] = {}
    for names in by_address.values():
        if len(names) > 1:
            for name in names:
                groups.setdefault(_view(tensors[name]), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _unusual(tensors: Sequence[torch.Tensor]) -> Sequence[int]:
    """The indices of tensors that are not ordinary dense tensors of torch's own types with all of their memory."""
    return range(len(tensors)) if INSPECTOR is None else INSPECTOR.unusual(tensors)


def _view(tensor: torch.Tensor) -> Hashable:
    local = local_of(tensor)
    return (
        local.device,
        # An empty tensor has no address, but on another rank the same tensor may have values.
        local.data_ptr() or (local.untyped_storage()._cdata, local.storage_offset()),
        local.dtype,
        tensor.shape,
        local.shape,
        local.stride(),
        # Torch conjugates and negates such views when they are read.
        local.is_conj(),
        local.is_neg(),
    )


def _check_subclass(name: str, tensor: torch.Tensor) -> None:
    if is_dtensor(tensor):
        placements: Any = tensor.placements  # type: ignore[attr-defined]
        if any(placement.is_partial() for placement in placements):
            raise InvalidInputError(
                f"{name!r} is a DTensor placed {placements}, whose values are yet to be reduced: redistribute it first"
            )
        check_tensor(name, local_of(tensor))
        return
    kind = type(tensor)
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise InvalidInputError(f"{name!r} is uninitialized: run the model once before saving it")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InvalidTypeError(
            f"{name!r} is a {kind.__module__}.{kind.__qualname__}, which has no dense values of its own: turn it into "
            "plain tensors first, or give a to_hf that does"
        )


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


# The child of each kind of wrapper that is the wrapped module: top package and class of the wrapper, with the child's
# name. A module of another kind may have a child of the same name.
_WRAPPED_CHILDREN = {
    ("torch", "DataParallel"): "module",
    ("torch", "DistributedDataParallel"): "module",
    ("torch", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    ("torch", "OptimizedModule"): "_orig_mod",
    ("torch", "ActivationWrapper"): "_checkpoint_wrapped_module",
    ("deepspeed", "DeepSpeedEngine"): "module",
    ("megatron", "DistributedDataParallel"): "module",
    ("megatron", "Float16Module"): "module",
}
# In a mapping the types are unknown: these are taken off where every name begins with one.
_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


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
            inputs = [_named_of_mapping(given)]
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
            "two tensors have the name {!r}, under two prefixes: change one of them",
        )
    return inputs


def check_name(name: object) -> None:
    """Refuse a tensor name that is no string, is empty, or leads to another folder as a path."""
    if not isinstance(name, str):
        raise InvalidTypeError(f"the name of a tensor is {name!r}: names are strings")
    if not name or name == "__metadata__" or not name.isprintable():
        raise InvalidInputError(f"{name!r} cannot name a tensor: give printable text")
    if ".." in name or name[0] in "/\\" or name[1:3] in (":/", ":\\"):
        raise InvalidInputError(f"the tensor name {name!r} looks like a path ('..', '/'): rename it")


def refuse_repeated(names: Iterable[str], message: str) -> None:
    """Raise `InvalidInputError` with `message`, formatted with the first name that two have."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidInputError(message.format(name))
        seen.add(name)


def without_wrappers(module: nn.Module) -> nn.Module:
    """The module inside of wrappers."""
    child = _wrapped_child(module)
    return module if child is None else without_wrappers(getattr(module, child))


def paths_without_wrappers(module: nn.Module) -> dict[str, str]:
    """The path of each module in `module` to its path without those of wrappers, which are modules too."""
    plain: dict[str, str] = {}

    def visit(given: nn.Module, path: str, kept: str) -> None:
        plain[path] = kept
        wrapped = _wrapped_child(given)
        for name, child in given._modules.items():
            if child is not None:
                visit(child, _joined(path, name), kept if name == wrapped else _joined(kept, name))

    visit(module, "", "")
    return plain


def name_without_wrappers(name: str, module: nn.Module) -> str:
    """The `name` of a tensor of `module` without the names of wrappers; some wrappers take theirs off themselves."""
    kept = []
    here: nn.Module | None = module
    for part in name.split("."):
        is_wrapper = False
        while here is not None and not is_wrapper and (wrapped := _wrapped_child(here)) is not None:
            here, is_wrapper = here._modules[wrapped], part == wrapped
        if not is_wrapper:
            kept.append(part)
            here = None if here is None else here._modules.get(part)
    return ".".join(kept)


def _wrapped_child(module: nn.Module) -> str | None:
    """The name of the child that a wrapper wraps; None if the module is no wrapper."""
    return _wrapped_child_of(type(module))  # type: ignore[arg-type]  # types are hashable


@functools.lru_cache(maxsize=1024)
def _wrapped_child_of(kind: type) -> str | None:
    known = (
        _WRAPPED_CHILDREN.get((base.__module__.partition(".")[0], base.__name__)) for base in kind.__mro__
    )
    return next(filter(None, known), None)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _named_of_module(prefix: Any, module: nn.Module) -> NamedTensors:
    if not isinstance(prefix, str):
        raise InvalidTypeError(f"the prefix of a module is {prefix!r}: prefixes are strings")
    if prefix:
        check_name(prefix)
        prefix = prefix if prefix.endswith(".") else f"{prefix}."
    # The parameters themselves: a detached copy takes 50 µs for a DTensor.
    given = dict(module.state_dict(keep_vars=True))
    has_wrappers = any(_wrapped_child(one) for one in module.modules())
    names = [name_without_wrappers(name, module) if has_wrappers else name for name in given]
    return NamedTensors(prefix=prefix, module=without_wrappers(module), tensors=_named(given, tuple(names)))


def _named_of_mapping(tensors: dict[Any, Any]) -> NamedTensors:
    return NamedTensors(prefix="", module=None, tensors=_named(tensors, _without_prefixes(tuple(tensors))))


def _named(tensors: Mapping[Any, Any], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """`tensors` by other `names`."""
    for given, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidTypeError(
                f"{given!r} is {format_type(tensor)}, not a tensor: give the mapping of names to tensors without it"
            )
    _check_names(names)
    return dict(zip(names, tensors.values(), strict=True))


# A training loop saves the same thousands of names again and again.
@functools.lru_cache(maxsize=8)
def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        check_name(name)
    refuse_repeated(names, "two tensors have the name {!r} without those of wrappers: rename one of them")


@functools.lru_cache(maxsize=8)
def _without_prefixes(names: tuple[Any, ...]) -> tuple[str, ...]:
    """`names` without the prefixes of wrappers that all of them have."""
    for name in names:
        check_name(name)
    found = True
    while found and names:
        found = False
        for prefix in _WRAPPER_PREFIXES:
            if all(name.startswith(prefix) for name in names):
                names, found = tuple(name.removeprefix(prefix) for name in names), True
    # torch.compile of a part of the model; from_pretrained would not know the names.
    inside = [
        name for name in names if any(part in f".{name}" for part in map(".{}".format, _WRAPPER_PREFIXES[1:]))
    ]
    if inside:
        _logger.warning(
            "%d names hold that of a wrapper, such as %r, and are saved so: give the module, whose wrappers are known",
            len(inside),
            inside[0],
        )
    return names
