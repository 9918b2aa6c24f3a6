"""How tensors and arrays that are more than plain tensors are pickled: as plain tensors and a function.

A tensor is *plain* if it is exactly a `torch.Tensor`, strided, in memory, without gradient, lazy conjugation or
negation. Each function that rebuilds takes plain tensors, or tensors that such a function rebuilt.

Invariants:

1. Every tensor consists of plain ones, or is refused. So no bytes of a tensor are in a pickle.
2. An array whose dtype torch lacks becomes a tensor of its bytes. Only arrays of references, such as Python objects,
   and arrays with a pickle format of their own, such as `MaskedArray`, are pickled by numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tundish.errors import InvalidTypeError

# The result of pickle's `__reduce__`: a function, its arguments, and perhaps a state and what sets it.
Reduced = tuple[Any, ...]

_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}

# The dtypes that numpy has too. Making their tensors from numpy arrays takes half the time of `torch.frombuffer`.
NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}

# Numpy's codes of the dtypes that `torch.from_numpy` takes. numpy has two codes for some integer widths; torch accepts
# one.
_TORCH_CODES = frozenset("?bhBHefdFD").union(
    np.dtype(f"{sign}int{bits}").char for sign in ("", "u") for bits in (32, 64)
)


class Refusal(Exception):
    """The reason why an object is refused. The caller that knows its path raises it as an error of the library."""

    def __init__(self, kind: type[Exception], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


def reduce_tensor(tensor: Tensor) -> Reduced | None:
    """How a tensor is rebuilt; None: it is plain. Raises `Refusal`."""
    if type(tensor) is not Tensor:
        return _reduce_subclass(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        raise Refusal(
            InvalidTypeError, "is a tensor inside a transformation of torch.func: send the one outside"
        )
    if tensor.is_nested:
        raise Refusal(
            InvalidTypeError, "is a nested tensor of the strided layout: make it one of layout=torch.jagged"
        )
    if tensor.is_quantized:
        raise Refusal(InvalidTypeError, "is a quantized tensor: send its int_repr(), scales and zero points")
    if tensor.requires_grad:
        return _with_gradient, (tensor.detach(),)
    if tensor.device.type == "meta":
        return _meta, (tuple(tensor.shape), _strides(tensor), tensor.dtype)
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return _coo, (tensor._indices(), tensor._values(), tuple(tensor.shape), tensor.is_coalesced())
    if layout in _COMPRESSED:
        compressed, plain = (get(tensor) for get in _COMPRESSED[layout])
        return _compressed, (compressed, plain, tensor.values(), tuple(tensor.shape), layout)
    if layout is not torch.strided:
        raise Refusal(InvalidTypeError, f"is a tensor of {layout}: make it dense first")
    if tensor.is_conj():
        return _conjugate, (tensor.conj(),)
    if tensor.is_neg():
        return _negative, (torch._neg_view(tensor),)
    if tensor.numel() and not tensor.data_ptr():
        raise Refusal(
            InvalidTypeError,
            "has no memory, because its storage was freed or its device has none: send a tensor with values",
        )
    return None


def _reduce_subclass(tensor: Tensor) -> Reduced:
    kind = type(tensor)
    if kind.__name__ == "DTensor":
        raise Refusal(InvalidTypeError, "is a DTensor, and each rank has only a part: send its to_local()")
    if is_lazy(tensor):
        raise Refusal(InvalidTypeError, "has no values yet: run the module once, which initializes it")
    # The subclass may override torch's functions.
    with torch._C.DisableTorchFunctionSubclass():
        is_nested, requires_grad = tensor.is_nested, tensor.requires_grad
    if is_nested:
        return _reduce_jagged(tensor)
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, context = wrapper.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        with torch._C.DisableTorchFunctionSubclass():
            shape, strides = tuple(tensor.shape), _strides(tensor)
        return _wrapper, (kind, inner, context, shape, strides, requires_grad)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise Refusal(InvalidTypeError, f"is a {kind.__qualname__}, whose parts no __tensor_flatten__ names")
    with torch._C.DisableTorchFunctionSubclass():
        values = tensor.detach().as_subclass(Tensor)
    state = object.__getstate__(tensor)
    return _subclass, (kind, values, requires_grad), state, None, None, _set_state


def _reduce_jagged(tensor: Any) -> Reduced:
    # The extremes of the lengths that torch knows by now; asking for others would compute them.
    known = tensor._maybe_min_seqlen, tensor._maybe_max_seqlen
    parts = tensor.values().detach(), tensor.offsets(), tensor.lengths(), *known
    return _jagged, (*parts, tensor._ragged_idx, tensor.requires_grad)


def reduce_array(array: NDArray[Any]) -> Reduced | None:
    """How an array is rebuilt; None: numpy pickles it. The first argument is a tensor, or an array without subclass."""
    kind, dtype = type(array), array.dtype
    if kind is not np.ndarray:
        is_like_arrays = all(
            getattr(kind, name) is getattr(np.ndarray, name)
            for name in ("__reduce__", "__reduce_ex__", "__setstate__")
        )
        return (_array_subclass, (array.view(np.ndarray), kind)) if is_like_arrays else None
    # Objects and numpy's StringDType are references, not values.
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind not in "biufcmMSUV":
        return None
    is_writable = array.flags.writeable
    # torch has neither read-only tensors nor negative strides.
    if not is_writable or any(stride < 0 for stride in array.strides):
        array = array.copy(order="K")
    if dtype.char in _TORCH_CODES and dtype.isnative and dtype.metadata is None:
        if any(stride % dtype.itemsize for stride in array.strides):
            # A field of a structured array has such strides.
            array = array.copy()
        return build_array, (torch.from_numpy(array), None, is_writable)
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return build_array, (torch.from_numpy(octets).view(*array.shape, dtype.itemsize), dtype, is_writable)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(map(int, tensor.stride()))


def _with_gradient(tensor: Tensor) -> Tensor:
    # Another tensor over the same memory may have no gradient.
    return tensor.detach().requires_grad_()


def _conjugate(tensor: Tensor) -> Tensor:
    return tensor.conj()


def _negative(tensor: Tensor) -> Tensor:
    return torch._neg_view(tensor)


def _meta(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _coo(indices: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, check_invariants=False, is_coalesced=is_coalesced
    )


def _compressed(
    compressed: Tensor, plain: Tensor, values: Tensor, shape: tuple[int, ...], layout: torch.layout
) -> Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, device=values.device, check_invariants=False
    )


def _wrapper(
    kind: Any,
    inner: dict[str, Tensor],
    context: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    tensor: Tensor = kind.__tensor_unflatten__(inner, context, shape, strides)
    return _with_gradient(tensor) if requires_grad else tensor


def _subclass(kind: type[Tensor], values: Tensor, requires_grad: bool) -> Tensor:
    return Tensor._make_subclass(kind, values, requires_grad)


def _set_state(tensor: Tensor, state: Any) -> None:
    attributes, slots = state if type(state) is tuple else (state, None)
    vars(tensor).update(attributes or {})
    for name, value in (slots or {}).items():
        object.__setattr__(tensor, name, value)


def _jagged(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    shortest: int | None,
    longest: int | None,
    jagged_dim: int,
    requires_grad: bool,
) -> Tensor:
    tensor: Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=jagged_dim, min_seqlen=shortest, max_seqlen=longest
    )
    return _with_gradient(tensor) if requires_grad else tensor


def build_array(values: Tensor, dtype: np.dtype[Any] | None, is_writable: bool) -> NDArray[Any]:
    """The array of a tensor, in host memory; `dtype` where the tensor has its bytes."""
    array: NDArray[Any] = values.cpu().numpy()
    if dtype is not None:
        array = np.ascontiguousarray(array).reshape(-1).view(dtype).reshape(array.shape[:-1])
    if not is_writable:
        array = array.view()
        array.flags.writeable = False
    return array


def _array_subclass(array: NDArray[Any], kind: type[NDArray[Any]]) -> NDArray[Any]:
    return array.view(kind)
