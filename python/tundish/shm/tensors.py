"""Tensors of torch in shared memory, and as what to share them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tundish.errors import InvalidTypeError
from tundish.shm.layout import Layout

__all__ = ["numpy_dtype_of", "numpy_view_of", "tensor_in"]

# By bytes an element: what stands for a dtype that numpy has not.
_NUMPY_INTEGERS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}
# As far as this torch has them.
_QUANTIZED = frozenset(
    getattr(torch, name, None) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
)
_TORCH_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def numpy_dtype_of(dtype: torch.dtype) -> tuple[np.dtype[Any], str | None]:
    """Numpy's dtype for one of torch's; where it has none an integer of its width, and the name of torch's."""
    if dtype in _QUANTIZED:
        raise InvalidTypeError(
            f"tensors of {dtype} cannot be shared, as their scales are no part of their values: share one's "
            "int_repr(), and its scales beside that"
        )
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype, None
    except TypeError:
        name = str(dtype).removeprefix("torch.")
        if dtype.itemsize not in _NUMPY_INTEGERS or getattr(torch, name, None) is not dtype:
            raise InvalidTypeError(f"tensors of {dtype} cannot be shared") from None
        return _NUMPY_INTEGERS[dtype.itemsize], name


def numpy_view_of(tensor: torch.Tensor) -> tuple[NDArray[Any], str | None]:
    """The values of a tensor in host memory, without a copy where they lie there as they are."""
    if tensor.device.type != "cpu":
        raise InvalidTypeError(f"a tensor on {tensor.device} cannot be shared: move it to the CPU first")
    if tensor.layout is not torch.strided:
        raise InvalidTypeError(f"a tensor of {tensor.layout} cannot be shared: make it dense first")
    values = tensor.detach().resolve_conj().resolve_neg()
    if type(values) is not torch.Tensor:
        raise InvalidTypeError(f"a {type(tensor).__name__} cannot be shared: share the tensor in it")
    numpy_dtype, name = numpy_dtype_of(values.dtype)
    if name is not None:
        values = values.view(_TORCH_INTEGERS[numpy_dtype.itemsize])
    return values.numpy(), name


def tensor_in(layout: Layout, memory: Any) -> torch.Tensor:
    """The tensor that lies in `memory`, a writable buffer which it keeps."""
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
