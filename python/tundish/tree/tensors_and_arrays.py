"""The rules for tensors and numpy arrays: what they consist of, and how they are made again.

A tensor is *plain* if it is exactly a `torch.Tensor`, strided, without gradient, lazy conjugation or negation: its
bytes, shape and strides are all of it.

Invariants:

1. Every tensor consists of plain ones, or is refused.
2. An array travels as a tensor of its dtype or, where torch has none, of its bytes, and stays in host memory. An array
   of Python objects is opaque.
3. An array of a subclass that pickles as arrays do (`memmap`, `recarray`) is made of a plain one, without attributes.
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
from tundish.tree.node_spec import NodeSpec, Refusal

__all__ = [
    "NUMPY_DTYPES",
    "QUANTIZED",
    "TENSOR_BUILDERS",
    "array_of",
    "array_spec",
    "array_subclass_spec",
    "pickles_as_array",
    "tensor_spec",
    "tensor_subclass_spec",
]

_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}
# torch keeps several elements of these in a byte.
_SUB_BYTE = frozenset({torch.quint4x2, torch.quint2x4})
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, *_SUB_BYTE})
_PER_CHANNEL = torch.per_channel_affine, torch.per_channel_affine_float_qparams


def tensor_spec(tensor: Tensor) -> NodeSpec | None:
    """What a tensor of exactly the type `torch.Tensor` is made of; None: it is plain.

    Raises `Refusal`.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        raise Refusal(
            InvalidTypeError, "is a tensor inside a transformation of torch.func: carry the one outside"
        )
    if tensor.is_nested:
        raise Refusal(
            InvalidTypeError, "is a nested tensor of the strided layout: make it one of layout=torch.jagged"
        )
    if tensor.requires_grad:
        return NodeSpec(("grad",), (tensor.detach(),), ("",))
    if tensor.device.type == "meta":
        return NodeSpec(("meta", tensor.dtype), (tuple(tensor.shape), _strides(tensor)))
    layout = tensor.layout
    if layout is torch.sparse_coo:
        coo = tensor._indices(), tensor._values(), tuple(tensor.shape)
        return NodeSpec(("coo", tensor.is_coalesced()), coo, ("._indices()", "._values()", ".shape"))
    if layout in _COMPRESSED:
        compressed, plain = (get(tensor) for get in _COMPRESSED[layout])
        parts = compressed, plain, tensor.values(), tuple(tensor.shape)
        return NodeSpec(("compressed", layout), parts, (*[" (indices)"] * 2, ".values()", ".shape"))
    if layout is not torch.strided:
        raise Refusal(InvalidTypeError, f"is a tensor of {layout}: make it dense first")
    if tensor.is_quantized:
        return _quantized_parts(tensor)
    if tensor.is_conj():
        return NodeSpec(("conj",), (tensor.conj(),), ("",))
    if tensor.is_neg():
        return NodeSpec(("neg",), (torch._neg_view(tensor),), ("",))
    if tensor.numel() and not tensor.data_ptr():
        raise Refusal(
            InvalidTypeError, "has no memory: it was given back, or is not on a device that has any"
        )
    return None


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(map(int, tensor.stride()))


def _quantized_parts(tensor: Tensor) -> NodeSpec:
    scheme = tensor.qscheme()
    storage = tensor.untyped_storage()
    if tensor.dtype in _SUB_BYTE:
        first, length, offset = 0, storage.nbytes(), int(tensor.storage_offset())
    else:
        extent = sum((size - 1) * step for size, step in zip(tensor.shape, _strides(tensor), strict=True))
        first = int(tensor.storage_offset()) * tensor.itemsize
        length, offset = (extent + 1) * tensor.itemsize if tensor.numel() else 0, 0
    values = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, first, (length,), (1,))
    if scheme == torch.per_tensor_affine:
        how: tuple[Any, ...] = tensor.q_scale(), tensor.q_zero_point()
    elif scheme in _PER_CHANNEL:
        how = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
    else:
        raise Refusal(InvalidTypeError, f"is quantized by {scheme}, which cannot be carried")
    geometry = tuple(tensor.shape), _strides(tensor), offset
    return NodeSpec(("quantized", tensor.dtype, scheme), (values, *geometry, *how))


def tensor_subclass_spec(tensor: Tensor) -> NodeSpec:
    """What a tensor of a subclass is made of. Raises `Refusal`."""
    kind = type(tensor)
    if kind.__name__ == "DTensor":
        raise Refusal(
            InvalidTypeError, "is a DTensor, a part of it on each rank of its mesh: carry its to_local()"
        )
    if is_lazy(tensor):
        raise Refusal(InvalidTypeError, "has no values yet: run the module once, which initializes it")
    # What the subclass makes of torch's functions does not matter to what it is.
    with torch._C.DisableTorchFunctionSubclass():
        is_nested, requires_grad = tensor.is_nested, tensor.requires_grad
        # Those of a nested one are no numbers.
        geometry = () if is_nested else (tuple(tensor.shape), _strides(tensor))
    if is_nested:
        return _jagged_parts(tensor)
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, context = wrapper.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        labels = *[f".{name}" for name in names], " (context)", ".shape", ".stride()"
        token = "wrapper", kind, tuple(names), requires_grad
        return NodeSpec(token, (*inner, context, *geometry), labels)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise Refusal(
            InvalidTypeError,
            f"is a {kind.__qualname__}, which does not say by __tensor_flatten__ what it is made of",
        )
    with torch._C.DisableTorchFunctionSubclass():
        values = tensor.detach().as_subclass(Tensor)
    # Its attributes, and with slots a pair of both.
    state = object.__getstate__(tensor)
    builder = "parameter" if issubclass(kind, torch.nn.Parameter) else "subclass"
    return NodeSpec((builder, kind, requires_grad), (values, state), ("", ".__dict__"))


def _jagged_parts(tensor: Any) -> NodeSpec:
    values, offsets, lengths = tensor.values(), tensor.offsets(), tensor.lengths()
    # What torch knows of the lengths by now; to ask for more would be a computation.
    known = tensor._maybe_min_seqlen, tensor._maybe_max_seqlen
    labels = ".values()", ".offsets()", ".lengths()", " (shortest)", " (longest)"
    token = "jagged", tensor._ragged_idx, tensor.requires_grad
    return NodeSpec(token, (values.detach(), offsets, lengths, *known), labels)


def _make_grad(_: Any, parts: list[Tensor]) -> Tensor:
    # Of its own, since the same memory may be named elsewhere without a gradient.
    return parts[0].detach().requires_grad_()


def _make_meta(token: Any, parts: list[Any]) -> Tensor:
    return torch.empty_strided(*parts, dtype=token[1], device="meta")


def _make_coo(token: Any, parts: list[Any]) -> Tensor:
    return torch.sparse_coo_tensor(
        *parts, device=parts[1].device, check_invariants=False, is_coalesced=token[1]
    )


def _make_compressed(token: Any, parts: list[Any]) -> Tensor:
    return torch.sparse_compressed_tensor(
        *parts, device=parts[2].device, layout=token[1], check_invariants=False
    )


def _make_quantized(token: Any, parts: list[Any]) -> Tensor:
    _, dtype, scheme = token
    values, size, stride, offset, *how = parts
    if scheme == torch.per_tensor_affine:
        scale, zero_point = how
        tensor = torch._empty_affine_quantized(
            (0,), scale=scale, zero_point=zero_point, dtype=dtype, device=values.device
        )
    else:
        scales, zero_points, axis = how
        tensor = torch._empty_per_channel_affine_quantized(
            size, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=values.device
        )
    if values.storage_offset() % dtype.itemsize:
        # As where it was put together out of bytes that begin anywhere.
        values = values.clone()
    first = values.storage_offset() // dtype.itemsize + offset
    made: Tensor = tensor.set_(values.untyped_storage(), first, size, stride)
    return made


def _make_wrapper(token: Any, parts: list[Any]) -> Any:
    _, kind, names, requires_grad = token
    *inner, context, size, stride = parts
    tensor = kind.__tensor_unflatten__(dict(zip(names, inner, strict=True)), context, size, stride)
    return tensor.detach().requires_grad_() if requires_grad else tensor


def _make_subclass(token: Any, parts: list[Any]) -> Tensor:
    _, kind, requires_grad = token
    values, state = parts
    tensor: Tensor = values.detach().as_subclass(kind)
    _set_attributes(tensor, state)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad_() if requires_grad else tensor


def _make_parameter(token: Any, parts: list[Any]) -> Tensor:
    _, kind, requires_grad = token
    values, state = parts
    parameter: Tensor = Tensor._make_subclass(kind, values, requires_grad)
    _set_attributes(parameter, state)
    return parameter


def _set_attributes(tensor: Tensor, state: Any) -> None:
    attributes, slots = state if type(state) is tuple else (state, None)
    vars(tensor).update(attributes or {})
    for name, value in (slots or {}).items():
        object.__setattr__(tensor, name, value)


def _make_jagged(token: Any, parts: list[Any]) -> Tensor:
    _, jagged_dim, requires_grad = token
    values, offsets, lengths, shortest, longest = parts
    tensor: Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=jagged_dim, min_seqlen=shortest, max_seqlen=longest
    )
    return tensor.detach().requires_grad_() if requires_grad else tensor


TENSOR_BUILDERS = {
    "grad": _make_grad,
    "meta": _make_meta,
    "coo": _make_coo,
    "compressed": _make_compressed,
    "quantized": _make_quantized,
    "conj": lambda _, parts: parts[0].conj(),
    "neg": lambda _, parts: torch._neg_view(parts[0]),
    "wrapper": _make_wrapper,
    "subclass": _make_subclass,
    "parameter": _make_parameter,
    "jagged": _make_jagged,
}


# Dtypes that numpy has too and every torch can make tensors of: over numpy's arrays that takes half the time.
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

# Codes of dtypes that torch has too; of the two for an integer of one width it knows one only.
_KINDS = frozenset("?bhBHefdFD").union(
    np.dtype(f"{sign}int{bits}").char for sign in ("", "u") for bits in (32, 64)
)


def array_spec(array: NDArray[Any]) -> NodeSpec | None:
    """What an array (of exactly the type ndarray) is made of."""
    dtype = array.dtype
    # Strings of numpy's StringDType and objects are references, not values; subarrays and the like have a text of
    # another dtype.
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind not in "biufcmMSUV":
        return None
    writable = array.flags.writeable
    # torch would let the values be written to, or warns that it might; and knows no negative strides.
    if not writable or any(stride < 0 for stride in array.strides):
        array = array.copy(order="K")
    if dtype.char in _KINDS and dtype.isnative and dtype.metadata is None:
        if any(stride % dtype.itemsize for stride in array.strides):
            # As in a column of records.
            array = array.copy()
        return NodeSpec(("array", None, writable), (torch.from_numpy(array),), ("",))
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    tensor = torch.from_numpy(values).view(*array.shape, dtype.itemsize)
    name = dtype.str
    if np.dtype(name) == dtype and dtype.metadata is None:
        return NodeSpec(("array", name, writable), (tensor,), ("",))
    return NodeSpec(("array of", writable), (dtype, tensor), (".dtype", ""))


def pickles_as_array(kind: type) -> bool:
    """Whether arrays of the subclass `kind` are pickled as plain ones are."""
    return all(
        getattr(kind, name) is getattr(np.ndarray, name)
        for name in ("__reduce__", "__reduce_ex__", "__setstate__")
    )


def array_subclass_spec(array: NDArray[Any]) -> NodeSpec:
    """What an array of such a subclass is made of."""
    return NodeSpec(("array as", type(array)), (array.view(np.ndarray),), ("",))


def array_of(tensor: torch.Tensor, dtype: np.dtype[Any] | None, writable: bool) -> NDArray[Any]:
    """The array that `tensor` was made of; `dtype`: of its items, where the tensor has their bytes."""
    array: NDArray[Any] = tensor.cpu().numpy()
    if dtype is not None:
        array = np.ascontiguousarray(array).reshape(-1).view(dtype).reshape(array.shape[:-1])
    if not writable:
        array = array.view()
        array.flags.writeable = False
    return array
