"""Makes dense host tensors of any tensors, to be stored, and tensors of fetched bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.tensor_bytes import extent
from tundish.tree import DLPACK_EXCHANGE, NUMPY_DTYPES, Refusal

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
