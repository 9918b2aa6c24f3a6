"""numpy arrays: as tensors, and back.

What always holds: an array travels as a tensor of its dtype or, where torch has none, of its bytes, and stays in host
memory; an array of Python objects is opaque. One of a subclass that pickles as arrays do (a part of a `memmap`, a
`recarray`) is made of a plain one, and has no other attributes, as in a pickle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tundish.tree.parts import Parts

__all__ = ["NUMPY_DTYPES", "array_of", "array_parts", "array_subclass_parts", "pickles_as_array"]

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


def pickles_as_array(kind: type) -> bool:
    """Whether arrays of the subclass `kind` are pickled as plain ones are."""
    return all(
        getattr(kind, name) is getattr(np.ndarray, name)
        for name in ("__reduce__", "__reduce_ex__", "__setstate__")
    )


def array_subclass_parts(array: NDArray[Any]) -> Parts:
    """What an array of such a subclass is made of."""
    return Parts(("array as", type(array)), (array.view(np.ndarray),), ("",))


def array_of(tensor: torch.Tensor, dtype: np.dtype[Any] | None, writable: bool) -> NDArray[Any]:
    """The array that `tensor` was made of; `dtype`: of its items, where the tensor has their bytes."""
    array: NDArray[Any] = tensor.cpu().numpy()
    if dtype is not None:
        array = np.ascontiguousarray(array).reshape(-1).view(dtype).reshape(array.shape[:-1])
    if not writable:
        array = array.view()
        array.flags.writeable = False
    return array
