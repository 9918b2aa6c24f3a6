"""Converts torch tensors to numpy arrays and back, and pickles tensors as arrays."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tundish.errors import InvalidTypeError, format_type
from tundish.shm.array_layout import ArrayLayout
from tundish.tensor_bytes import INTEGER_DTYPES


def numpy_dtype_of(dtype: torch.dtype) -> tuple[np.dtype[Any], str | None]:
    """Return numpy's dtype and None; or an integer of the same width and torch's name if numpy lacks the dtype."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("q"):
        raise InvalidTypeError(
            f"tensors of {dtype} cannot be shared with their scales: share tensor.int_repr() and the scales"
        )
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype, None
    except TypeError:
        if dtype.itemsize not in INTEGER_DTYPES:
            raise InvalidTypeError(f"tensors of {dtype} cannot be shared") from None
        return torch.empty(0, dtype=INTEGER_DTYPES[dtype.itemsize]).numpy().dtype, name


def numpy_view_of(tensor: torch.Tensor) -> tuple[NDArray[Any], str | None]:
    """Return a view of a CPU tensor, and the name of torch's dtype if numpy lacks it."""
    if tensor.device.type != "cpu":
        raise InvalidTypeError(f"a tensor on {tensor.device} cannot be shared: move it to the CPU first")
    if tensor.layout is not torch.strided:
        raise InvalidTypeError(f"a tensor of {tensor.layout} cannot be shared: make it dense first")
    values = tensor.detach().resolve_conj().resolve_neg()
    if type(values) is not torch.Tensor:
        raise InvalidTypeError(f"{format_type(tensor)} cannot be shared: share the tensor in it")
    numpy_dtype, name = numpy_dtype_of(values.dtype)
    if name is not None:
        values = values.view(INTEGER_DTYPES[numpy_dtype.itemsize])
    return values.numpy(), name


def tensor_in(layout: ArrayLayout, memory: Any) -> torch.Tensor:
    """Return the tensor over `memory`, a writable buffer that the tensor keeps alive."""
    array = layout.array(memory)
    torch_dtype = layout.torch_dtype and getattr(torch, layout.torch_dtype, None)
    if torch_dtype and (not isinstance(torch_dtype, torch.dtype) or torch_dtype.itemsize != array.itemsize):
        raise InvalidTypeError(f"torch has no dtype {layout.torch_dtype!r} of {array.itemsize} bytes")
    try:
        tensor = torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"torch has no dtype for {layout.dtype}: ask for array instead of tensor()"
        ) from error
    return tensor.view(torch_dtype) if torch_dtype else tensor


def dumps_with_tensors(
    value: Any, protocol: int, *, buffer_callback: Callable[[pickle.PickleBuffer], Any]
) -> bytes:
    """Pickle `value` like `pickle.dumps`, and tensors like arrays: their memory goes to `buffer_callback`.

    A tensor with more than dtype, shape and values (a gradient, strides, attributes, a class) is pickled by torch. As
    with arrays, tensors that shared memory do not share it afterwards.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol, buffer_callback=buffer_callback).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        return _restored, numpy_view_of(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not tensor.__dict__
    )


def _restored(array: NDArray[Any], torch_dtype: str | None) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if torch_dtype is None else tensor.view(getattr(torch, torch_dtype))
