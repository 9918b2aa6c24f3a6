"""Checks which tensors can be saved, names their dtypes in safetensors files, and finds tied tensors.

It reads shapes, dtypes, layouts and addresses, never values. Ranks with other parts of the same tensors get the same
results.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tundish._native import TensorInspector
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.tensor_bytes import extent

__all__ = [
    "DTYPES",
    "INSPECTOR",
    "TensorSpec",
    "any_on_cuda",
    "check_gathered",
    "check_memories",
    "check_memory",
    "check_tensor",
    "check_tensors",
    "is_dtensor",
    "is_fp8",
    "local_of",
    "locals_of",
    "specs_of",
    "tied_names",
]

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
