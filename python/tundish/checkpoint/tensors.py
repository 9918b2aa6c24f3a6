"""Checks which tensors can be saved, names their dtypes in safetensors files, and finds tied tensors.

Only shapes, dtypes, layouts and addresses are looked at, never values. Ranks that hold other parts of the same tensors
come to the same result.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter, lt, mul, sub
from typing import Any

import torch
from torch import nn

from tundish._native import TensorReader
from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = [
    "DTYPES",
    "READER",
    "Facts",
    "any_on_cuda",
    "are_of_torch",
    "check_gathered",
    "check_tensor",
    "check_tensors",
    "facts_of",
    "is_dtensor",
    "is_fp8",
    "local_of",
    "locals_of",
    "tied_names",
]

# Name, shape, dtype.
Facts = tuple[str, tuple[int, ...], torch.dtype]

# The names of dtypes in a file, in the order in which safetensors lays tensors out: whatever needs more alignment
# comes first, so that nothing needs padding.
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
        ("float4_e2m1fn_x2", "F4"),
        ("bool", "BOOL"),
    )
    # The smallest floats are younger than the oldest torch that is supported.
    if hasattr(torch, name)
}

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)

# Of torch from 2.10 on; None of an older one, whose tensors are asked one by one.
READER = TensorReader.of(list(_PLAIN), torch.UntypedStorage)

# For `map`, which asks thousands of tensors the same in half of the time that a loop takes.
_dtype, _itemsize, _nbytes, _shape = map(attrgetter, ("dtype", "itemsize", "nbytes", "shape"))
_is_cuda, _is_meta, _is_nested = map(attrgetter, ("is_cuda", "is_meta", "is_nested"))


def are_of_torch(values: Iterable[object]) -> bool:
    """Whether all are tensors, and of no type but torch's own; the cheapest of all looks at thousands of them."""
    return set(map(type, values)).issubset(_PLAIN)


def any_on_cuda(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor is on a CUDA device; where torch has not turned to any, none has to be asked."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it so
    return is_used and any(map(_is_cuda, tensors))


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor; imports nothing."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`; no copy.

    `DTensor.to_local` finds out about gradients, and makes parameters of parts of parameters, which takes thousands of
    tensors milliseconds and a copy does not need. What is still on its way from other ranks is waited for.
    """
    if not is_dtensor(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    if type(local) not in _PLAIN:
        collectives = sys.modules.get("torch.distributed._functional_collectives")
        if collectives is not None and isinstance(local, collectives.AsyncCollectiveTensor):
            local = local.wait()
    return local  # type: ignore[no-any-return]


def locals_of(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """`local_of` each; much cheaper where none is a DTensor."""
    if are_of_torch(tensors):
        return list(tensors)
    return [local_of(tensor) for tensor in tensors]


def facts_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Facts, ...]:
    """Names, shapes (of the whole tensors) and dtypes."""
    values = tensors.values()
    return tuple(zip(tensors, map(_shape, values), map(_dtype, values), strict=True))


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether `dtype` is a float of eight bits or less, which means nothing without its scales."""
    return dtype.itemsize == 1 and dtype.is_floating_point


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has no values here, or values that no file can hold.

    Raises:
        InvalidTypeError: sparse, quantized, nested or another subclass of tensors.
        InvalidInputError: on the meta device, freed, sharded by DeepSpeed, or a DTensor whose values are yet to be
            reduced.
    """
    if type(tensor) not in _PLAIN:
        _check_subclass(name, tensor)
    if tensor.layout is not torch.strided:
        raise InvalidTypeError(f"{name!r} is {_said(tensor.layout)}: save it dense, with tensor.to_dense()")
    if tensor.is_nested:
        raise InvalidTypeError(f"{name!r} is nested: save its tensors under names of their own")
    if tensor.is_meta:
        raise InvalidInputError(f"{name!r} is on the meta device and has no values: materialize it first")
    if tensor.is_quantized:
        raise InvalidTypeError(f"{name!r} is quantized ({_said(tensor.dtype)}): save tensor.dequantize()")
    check_gathered(name, tensor)
    check_memory(name, tensor)


def check_gathered(name: str, tensor: torch.Tensor) -> None:
    """Refuse a parameter that ZeRO-3 of DeepSpeed has sharded: it is empty here, and would be saved as that.

    Raises `InvalidInputError`.
    """
    if _is_partitioned(tensor):
        raise InvalidInputError(
            f"{name!r} is sharded by DeepSpeed (ZeRO-3) and has no values here: gather it first, with "
            "deepspeed.zero.GatheredParameters, or use DeepSpeed's own save"
        )


def _is_partitioned(tensor: torch.Tensor) -> bool:
    # DeepSpeed writes onto a parameter how many values it has when it is whole.
    is_marked = hasattr(tensor, "ds_id") and getattr(tensor, "ds_numel", 0) > 0
    return is_marked and tensor.numel() == 0


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose storage ends before it does: its values are gone, and to read them is to crash.

    Raises `InvalidInputError`.
    """
    if is_dtensor(tensor) or tensor.numel() == 0:
        return
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if (last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise InvalidInputError(
            f"{name!r} has no values: its storage of {tensor.untyped_storage().nbytes()} bytes was freed or cut, as "
            "wrappers do that shard parameters; save it where it is whole, or what the wrapper gives as state dict"
        )


def check_memories(names: Iterable[str], tensors: Collection[torch.Tensor]) -> None:
    """`check_memory` each; much cheaper where there is nothing to refuse."""
    try:
        if are_of_torch(tensors) and not _is_any_cut(tensors, list(map(_nbytes, tensors))):
            return
    except RuntimeError:
        # One has no storage.
        pass
    for name, tensor in zip(names, tensors, strict=True):
        check_memory(name, tensor)


def check_tensors(prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """`check_tensor` each, whose name begins with `prefix`; much cheaper where there is nothing to refuse."""
    if not _are_plain(tensors.values()):
        for name, tensor in tensors.items():
            check_tensor(prefix + name, tensor)


def _are_plain(tensors: Collection[torch.Tensor]) -> bool:
    # All dtypes of files are of strided or sparse tensors, and sparse ones have no storage.
    if not are_of_torch(tensors) or not DTYPES.keys() >= set(map(_dtype, tensors)):
        return False
    try:
        sizes = list(map(_nbytes, tensors))
        is_cut = _is_any_cut(tensors, sizes)
    except RuntimeError:
        return False
    # Only what is empty is asked one by one.
    if not all(sizes) and any(map(_is_partitioned, tensors)):
        return False
    return not is_cut and not any(map(_is_nested, tensors)) and not any(map(_is_meta, tensors))


def tied_names(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups of names of one and the same memory, seen in the same way; each of at least two, in the input's order.

    Parts of one memory that only overlap, or lie side by side, are tensors of their own.
    """
    addresses = list(map(torch.Tensor.data_ptr, locals_of(tensors.values())))
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


def _view(tensor: torch.Tensor) -> Hashable:
    local = local_of(tensor)
    return (
        local.device,
        # What is empty has no address, but on another rank the same tensor need not be empty.
        local.data_ptr() or (local.untyped_storage()._cdata, local.storage_offset()),
        local.dtype,
        tensor.shape,
        local.shape,
        local.stride(),
        # What torch turns when it is looked at has other values in the same memory.
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


def _said(value: object) -> str:
    return str(value).removeprefix("torch.")


def _is_any_cut(tensors: Collection[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Whether a storage ends before as many bytes; exact where tensors lie densely, and else worth a closer look.

    Raises `RuntimeError` where one has no storage.
    """
    held = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))
    before = map(mul, map(torch.Tensor.storage_offset, tensors), map(_itemsize, tensors))
    return any(map(lt, map(sub, held, before), sizes))
