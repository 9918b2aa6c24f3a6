"""The rules for numpy arrays: each travels as a tensor, and stays in host memory.

Invariant: an array whose dtype torch lacks travels as a tensor of its bytes. An array of Python objects is pickled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tundish.tree.object_parts import ObjectParts, Token

__all__ = ["ARRAY_BUILDERS", "NUMPY_DTYPES", "array_rule_of"]

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

# Numpy's codes of the dtypes that `torch.from_numpy` takes. Of two codes for one width of integer it takes one.
_TORCH_CODES = frozenset("?bhBHefdFD").union(
    np.dtype(f"{sign}int{bits}").char for sign in ("", "u") for bits in (32, 64)
)


def array_rule_of(kind: type) -> Any:
    """The rule for arrays of the class `kind`; None where they are pickled, as a `MaskedArray` is."""
    if kind is np.ndarray:
        return _array_parts
    pickles_as_array = all(
        getattr(kind, name) is getattr(np.ndarray, name)
        for name in ("__reduce__", "__reduce_ex__", "__setstate__")
    )
    return _array_subclass_parts if pickles_as_array else None


def _array_parts(array: NDArray[Any]) -> ObjectParts | None:
    dtype = array.dtype
    # Objects and numpy's StringDType are references, not values.
    if dtype.hasobject or dtype.itemsize == 0 or dtype.kind not in "biufcmMSUV":
        return None
    writable = array.flags.writeable
    # torch has neither read-only tensors nor negative strides.
    if not writable or any(stride < 0 for stride in array.strides):
        array = array.copy(order="K")
    if dtype.char in _TORCH_CODES and dtype.isnative and dtype.metadata is None:
        if any(stride % dtype.itemsize for stride in array.strides):
            # A field of a structured array has such strides.
            array = array.copy()
        return ObjectParts(("array", None, writable), (torch.from_numpy(array),), ("",))
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    tensor = torch.from_numpy(values).view(*array.shape, dtype.itemsize)
    return ObjectParts(("array", dtype, writable), (tensor,), ("",))


def _array_subclass_parts(array: NDArray[Any]) -> ObjectParts:
    return ObjectParts(("array subclass", type(array)), (array.view(np.ndarray),), ("",))


def _build_array(token: Token, parts: list[Any]) -> NDArray[Any]:
    _, dtype, writable = token
    array: NDArray[Any] = parts[0].cpu().numpy()
    if dtype is not None:
        array = np.ascontiguousarray(array).reshape(-1).view(dtype).reshape(array.shape[:-1])
    if not writable:
        array = array.view()
        array.flags.writeable = False
    return array


ARRAY_BUILDERS = {
    "array": _build_array,
    "array subclass": lambda token, parts: parts[0].view(token[1]),
}
