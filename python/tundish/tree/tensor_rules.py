"""The rules for tensors that are more than their bytes, shape and strides, and the builders that undo them.

A tensor is *plain* if it is exactly a `torch.Tensor`, strided, without gradient, lazy conjugation or negation.

Invariant: every tensor consists of plain ones, or is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tundish.errors import InvalidTypeError
from tundish.tree.object_parts import ObjectParts, Refusal

__all__ = ["TENSOR_BUILDERS", "tensor_parts", "tensor_subclass_parts"]

_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}


def tensor_parts(tensor: Tensor) -> ObjectParts | None:
    """The parts of a tensor of exactly the type `torch.Tensor`; None: it is plain. Raises `Refusal`."""
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
        return ObjectParts(("grad",), (tensor.detach(),), ("",))
    if tensor.device.type == "meta":
        return ObjectParts(("meta", tensor.dtype), (tuple(tensor.shape), _strides(tensor)))
    layout = tensor.layout
    if layout is torch.sparse_coo:
        coo = tensor._indices(), tensor._values(), tuple(tensor.shape)
        return ObjectParts(("coo", tensor.is_coalesced()), coo, ("._indices()", "._values()", ".shape"))
    if layout in _COMPRESSED:
        compressed, plain = (get(tensor) for get in _COMPRESSED[layout])
        parts = compressed, plain, tensor.values(), tuple(tensor.shape)
        return ObjectParts(("compressed", layout), parts, (*[" (indices)"] * 2, ".values()", ".shape"))
    if layout is not torch.strided:
        raise Refusal(InvalidTypeError, f"is a tensor of {layout}: make it dense first")
    if tensor.is_conj():
        return ObjectParts(("conj",), (tensor.conj(),), ("",))
    if tensor.is_neg():
        return ObjectParts(("neg",), (torch._neg_view(tensor),), ("",))
    if tensor.numel() and not tensor.data_ptr():
        raise Refusal(
            InvalidTypeError,
            "has no memory, because its storage was freed or its device has none: send a tensor with values",
        )
    return None


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(map(int, tensor.stride()))


def tensor_subclass_parts(tensor: Tensor) -> ObjectParts:
    """The parts of a tensor of a subclass. Raises `Refusal`."""
    kind = type(tensor)
    if kind.__name__ == "DTensor":
        raise Refusal(InvalidTypeError, "is a DTensor, of which each rank has a part: send its to_local()")
    if is_lazy(tensor):
        raise Refusal(InvalidTypeError, "has no values yet: run the module once, which initializes it")
    # The subclass may override torch's functions.
    with torch._C.DisableTorchFunctionSubclass():
        is_nested, requires_grad = tensor.is_nested, tensor.requires_grad
        # The shape and strides of a nested tensor are not numbers.
        geometry = () if is_nested else (tuple(tensor.shape), _strides(tensor))
    if is_nested:
        return _jagged_parts(tensor)
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, context = wrapper.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        labels = *[f".{name}" for name in names], " (context)", ".shape", ".stride()"
        return ObjectParts(
            ("wrapper", kind, tuple(names), requires_grad), (*inner, context, *geometry), labels
        )
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise Refusal(InvalidTypeError, f"is a {kind.__qualname__}, whose parts no __tensor_flatten__ names")
    with torch._C.DisableTorchFunctionSubclass():
        values = tensor.detach().as_subclass(Tensor)
    return ObjectParts(
        ("subclass", kind, requires_grad), (values, object.__getstate__(tensor)), ("", ".__dict__")
    )


def _jagged_parts(tensor: Any) -> ObjectParts:
    values, offsets, lengths = tensor.values(), tensor.offsets(), tensor.lengths()
    # The extremes of the lengths that torch knows by now; asking for others would compute them.
    known = tensor._maybe_min_seqlen, tensor._maybe_max_seqlen
    labels = ".values()", ".offsets()", ".lengths()", " (shortest)", " (longest)"
    token = "jagged", tensor._ragged_idx, tensor.requires_grad
    return ObjectParts(token, (values.detach(), offsets, lengths, *known), labels)


def _build_meta(token: Any, parts: list[Any]) -> Tensor:
    return torch.empty_strided(*parts, dtype=token[1], device="meta")


def _build_coo(token: Any, parts: list[Any]) -> Tensor:
    return torch.sparse_coo_tensor(
        *parts, device=parts[1].device, check_invariants=False, is_coalesced=token[1]
    )


def _build_compressed(token: Any, parts: list[Any]) -> Tensor:
    return torch.sparse_compressed_tensor(
        *parts, device=parts[2].device, layout=token[1], check_invariants=False
    )


def _build_wrapper(token: Any, parts: list[Any]) -> Any:
    _, kind, names, requires_grad = token
    *inner, context, size, stride = parts
    tensor = kind.__tensor_unflatten__(dict(zip(names, inner, strict=True)), context, size, stride)
    return tensor.detach().requires_grad_() if requires_grad else tensor


def _build_subclass(token: Any, parts: list[Any]) -> Tensor:
    _, kind, requires_grad = token
    values, state = parts
    tensor: Tensor = Tensor._make_subclass(kind, values, requires_grad)
    attributes, slots = state if type(state) is tuple else (state, None)
    vars(tensor).update(attributes or {})
    for name, value in (slots or {}).items():
        object.__setattr__(tensor, name, value)
    return tensor


def _build_jagged(token: Any, parts: list[Any]) -> Tensor:
    _, jagged_dim, requires_grad = token
    values, offsets, lengths, shortest, longest = parts
    tensor: Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, jagged_dim=jagged_dim, min_seqlen=shortest, max_seqlen=longest
    )
    return tensor.detach().requires_grad_() if requires_grad else tensor


TENSOR_BUILDERS = {
    # Another tensor over the same memory may have no gradient.
    "grad": lambda _, parts: parts[0].detach().requires_grad_(),
    "meta": _build_meta,
    "coo": _build_coo,
    "compressed": _build_compressed,
    "conj": lambda _, parts: parts[0].conj(),
    "neg": lambda _, parts: torch._neg_view(parts[0]),
    "wrapper": _build_wrapper,
    "subclass": _build_subclass,
    "jagged": _build_jagged,
}
