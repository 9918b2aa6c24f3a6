"""numpy arrays: as tensors, and back.

What always holds: an array travels as a tensor of its dtype or, where torch has none, of its bytes, and stays in host
memory; an array of Python objects is opaque.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tundish.tree.parts import Parts

__all__ = ["array_of", "array_parts"]

# Codes of dtypes that torch has too; of the two for an integer of one width it knows one only.
_KINDS = frozenset("?bhBHefdFD").union(
    np.dtype(f"{sign}int{bits}").char for sign in ("", "u") for bits in (32, 64)
)


def array_parts(array: NDArray[Any]) -> Parts | None:
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
        return Parts(("array", None, writable), (torch.from_numpy(array),), ("",))
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    tensor = torch.from_numpy(values).view(*array.shape, dtype.itemsize)
    name = dtype.str
    if np.dtype(name) == dtype and dtype.metadata is None:
        return Parts(("array", name, writable), (tensor,), ("",))
    return Parts(("array of", writable), (dtype, tensor), (".dtype", ""))


def array_of(tensor: torch.Tensor, dtype: np.dtype[Any] | None, writable: bool) -> NDArray[Any]:
    """The array that `tensor` was made of; `dtype`: of its items, where the tensor has their bytes."""
    array: NDArray[Any] = tensor.cpu().numpy()
    if dtype is not None:
        array = np.ascontiguousarray(array).reshape(-1).view(dtype).reshape(array.shape[:-1])
    if not writable:
        array = array.view()
        array.flags.writeable = False
    return array
