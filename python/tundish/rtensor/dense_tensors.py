"""Makes tensors dense and trims them to be stored, and makes tensors of fetched bytes."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any, Final, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tundish import _native, tree
from tundish.errors import InvalidInputError, InvalidTypeError, format_count, format_type
from tundish.tensor_bytes import extent
from tundish.tree import DLPACK_EXCHANGE, NUMPY_DTYPES, Refusal

_MASK: Final = "attention_mask"
# A floating-point mask may be additive, and cuts nothing.
_MASK_DTYPES: Final = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
STORED_DTYPES: Final = frozenset(_native.stored_dtypes())


def dense(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor with the values of `tensor`: itself, or a copy.

    Raises:
        Refusal: the tensor is more than values in memory, has none, or has a dtype that cannot be sent.
    """
    if (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.is_cpu
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and tensor.dtype in STORED_DTYPES
        and is_whole(tensor)
    ):
        return tensor
    reason = _why_not(tensor)
    if reason is not None:
        raise Refusal(InvalidTypeError, f"is {reason}")
    if tensor._is_zerotensor():
        # All values are zero, and it has no memory.
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    if not is_whole(tensor):
        raise Refusal(
            InvalidInputError,
            "has no values: its storage was freed or cut, as wrappers do that shard parameters; store it where it is "
            "whole",
        )
    with torch._C.DisableTorchFunctionSubclass():
        values = tensor.detach().as_subclass(Tensor)
    # Before the copy: some devices lose the conjugate and negative bits on the way.
    return values.resolve_conj().resolve_neg().cpu().contiguous()


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor has memory for all its values: to read or write beyond it would crash."""
    if not tensor.numel():
        return True
    try:
        if type(tensor) is Tensor:
            return _has_memory(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            # The device of a subclass need not be that of its storage.
            return tensor.untyped_storage().device.type != "meta" and _has_memory(tensor)
    except RuntimeError:
        # Tensors within a transformation of torch.func have no storage.
        return False


def _has_memory(tensor: Tensor) -> bool:
    if tensor.is_meta or tensor._is_zerotensor():
        return False
    # Tensors that are made of other tensors have a storage without an address.
    if not tensor.data_ptr():
        return False
    end = (tensor.storage_offset() + extent(tensor)) * tensor.itemsize
    return bool(end <= tensor.untyped_storage().nbytes())


def distinct_tensors(obj: Any, trim: bool | Sequence[str]) -> tuple[list[Tensor], list[int]]:
    """The dense tensors in `obj`, trimmed as `remotize` says, each once; and for each use its place among them."""
    names = _names_to_trim(trim)
    found: list[Tensor] = []
    places: list[int] = []
    place_of: dict[Any, int] = {}
    # Keeps every tensor alive, so that no other one takes its address meanwhile.
    alive: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        place = place_of.setdefault(_identity(tensor), len(found))
        if place == len(found):
            found.append(dense(tensor))
        places.append(place)
        return tensor

    left = set(names or ())
    tree.map(collect, obj, enter=None if names is None else partial(_trimmed, names, left))
    if left:
        raise InvalidInputError(
            f"trim names {min(left)!r}, which no dict holds: name tensors beside an {_MASK}"
        )
    return found, places


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that show the same values in the same memory."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    # Tensors inside a transformation have no address, and those without memory may stand for zeros.
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not tensor.data_ptr():
        return id(tensor)
    form = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), form


def _names_to_trim(trim: Any) -> Set[str] | None:
    """The names that `trim` adds to tensors of the mask's shape; None trims nothing."""
    if isinstance(trim, bool):
        return frozenset() if trim else None
    if isinstance(trim, str) or not isinstance(trim, Iterable):
        raise InvalidTypeError(f'trim is {trim!r}: give True, False, or names such as ("logits",)')
    names = list(trim)
    if not all(isinstance(name, str) for name in names):
        raise InvalidTypeError(f'trim is {trim!r}: give names of tensors, such as ("logits",)')
    return frozenset(names)


def _trimmed(names: Set[str], left: set[str], container: Any) -> Any:
    """A dict without trailing columns that no row of its mask uses, or the same one; takes its names out of `left`."""
    if not isinstance(container, (dict, UserDict)):
        return container
    left.difference_update(container)
    mask = container.get(_MASK)
    if not _is_dense_table(mask) or mask.dtype not in _MASK_DTYPES or not mask.numel() or not is_whole(mask):
        return container
    columns = mask.shape[-1]
    used = mask.detach().ne(0).reshape(-1, columns).any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 0
    copied = copy.copy(container)
    for key, value in container.items():
        if key in names and isinstance(value, Tensor):
            if not _is_dense_table(value) or value.shape[: mask.ndim] != mask.shape:
                raise InvalidInputError(
                    f"trim names {key!r}, whose shape {tuple(value.shape)} does not begin with that of {_MASK}, "
                    f"{tuple(mask.shape)}: name tensors with the mask's rows and columns"
                )
            copied[key] = value.narrow(mask.ndim - 1, 0, width)
        elif _is_dense_table(value) and value.shape == mask.shape:
            copied[key] = value[..., :width]
    return container if width == columns else copied


def _is_dense_table(value: Any) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_meta
        and value.ndim >= 2
    )


def output_buffers(out: Any, handles: list[_native.RTensor]) -> list[Tensor]:
    """The tensors of `out`, one for each handle.

    Raises:
        InvalidTypeError: `out` contains anything but dense tensors with memory.
        InvalidInputError: a tensor does not fit its handle, or has no memory of its own for each value.
    """
    if not isinstance(out, Iterable):
        raise InvalidTypeError(f"out is {format_type(out)}: give a tensor, or a list of tensors")
    buffers = [out] if isinstance(out, Tensor) else list(out)
    if len(buffers) != len(handles):
        raise InvalidInputError(
            f"out has {format_count(len(buffers), 'tensor')} and obj has {format_count(len(handles), 'handle')}: "
            "give a tensor for each handle"
        )
    for number, (handle, buffer) in enumerate(zip(handles, buffers, strict=True)):
        _check_buffer(number, buffer, handle)
    return buffers


def _check_buffer(number: int, buffer: Any, handle: _native.RTensor) -> None:
    if not isinstance(buffer, Tensor):
        raise InvalidTypeError(f"out[{number}] is {format_type(buffer)}: give a tensor")
    if buffer.layout is not torch.strided or buffer.is_nested or buffer.is_meta:
        raise InvalidTypeError(
            f"out[{number}] is not dense, or is on the device meta: give a dense tensor with memory"
        )
    if buffer.dtype != handle.dtype or buffer.shape != handle.shape:
        raise InvalidInputError(
            f"out[{number}] is {buffer.dtype} of shape {tuple(buffer.shape)}, and its handle is "
            f"{handle.dtype} of shape {tuple(handle.shape)}: give a tensor like the handle"
        )
    if not is_whole(buffer):
        raise InvalidInputError(
            f"out[{number}] has no memory for its values, because its storage was freed or cut: give another tensor"
        )
    if any(not step and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
        raise InvalidInputError(
            f"out[{number}] is expanded, so several of its elements share memory: give a clone() of it"
        )
    if buffer.requires_grad:
        raise InvalidInputError(f"out[{number}] requires a gradient: give its detach()")


def tensors_over(views: Sequence[_native.ShardView], handles: Sequence[_native.RTensor]) -> list[Tensor]:
    """Tensors on the memory of views, with the dtypes and shapes of their handles.

    They can be trained with even if they are made in inference mode.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return tensors_over(views, handles)
    made: list[Tensor | None] = [None] * len(views)
    if DLPACK_EXCHANGE is not None:
        made = _native.tensors_over(DLPACK_EXCHANGE, list(views))
    return [
        _tensor_over(view, handle.dtype, handle.shape) if tensor is None else tensor
        for tensor, view, handle in zip(made, views, handles, strict=True)
    ]


def _tensor_over(view: _native.ShardView, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not len(view):
        return torch.empty(shape, dtype=dtype, device="cpu")
    numpy_dtype = NUMPY_DTYPES.get(dtype)
    if numpy_dtype is not None:
        # numpy takes any object with a buffer; its annotations do not say so.
        memory: Any = view
        return torch.from_numpy(np.ndarray(shape, numpy_dtype, memory))
    flat = torch.frombuffer(view, dtype=dtype)
    # `data` drops the reference to the base.
    return flat.view(shape).data


def _why_not(tensor: Tensor) -> str | None:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return "a tensor inside a transformation of torch.func: store the one outside"
    if isinstance(tensor, FakeTensor):
        return "a FakeTensor, which has no values"
    if type(tensor).__name__ == "DTensor":
        return "a DTensor, a part of it on each rank of its mesh: store its to_local()"
    wrapper: Any = tensor
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_nested:
            return "a nested tensor: store its values() and offsets()"
        if is_traceable_wrapper_subclass(wrapper):
            return f"{format_type(tensor)}, which is made of other tensors: store these"
        if tensor.layout is not torch.strided:
            return f"a tensor of {tensor.layout}: make it dense first"
        if tensor.is_quantized:
            return "a quantized tensor: store its int_repr() and its scales"
        if tensor.device.type == "meta":
            return "a tensor on the device meta, which has no values"
        if tensor.dtype not in STORED_DTYPES:
            return f"a tensor of {tensor.dtype}, which cannot be stored for others: convert it first"
    return None
