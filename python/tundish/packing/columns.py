"""Arguments as one-dimensional integer arrays, without a copy wherever the memory already is one.

Owns the conversion of lengths and orders from what users hold (numpy, torch, pyarrow, plain sequences) to
numpy. What always holds: the result is one-dimensional, of a native integer dtype, and nothing was rounded,
wrapped or turned into a Python list on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError

IntegerArray = NDArray[np.integer[Any]]


def as_integer_column(values: Any, name: str) -> IntegerArray:
    """`values` as a 1-D numpy array of integers, shape (n,).

    Args:
        values: a numpy array (strided or memory-mapped), a torch tensor, a pyarrow array, or a
            sequence of Python integers. Only a chunked pyarrow array of several chunks, a tensor on a
            device, a sequence and an array of foreign byte order are copied.
        name: what the argument is called, for messages.

    Raises:
        InvalidTypeError: floats, booleans, objects, nulls: anything that is no integer.
        InvalidInputError: another number of dimensions than one.
    """
    package = type(values).__module__.partition(".")[0]
    if package == "torch":
        values = _from_torch(values, name)
    elif package == "pyarrow":
        values = _from_arrow(values, name)
    elif isinstance(values, np.ma.MaskedArray):
        raise InvalidTypeError(f"{name} is a masked array; fill or drop the masked entries first")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidTypeError(f"{name} cannot be read as an array of integers: {error}") from error
    if array.ndim != 1:
        raise InvalidInputError(
            f"{name} must have one dimension, one entry a sample; it is a "
            f"{type(values).__name__} of shape {array.shape}"
        )
    if array.dtype.kind not in "iu":
        if array.size == 0 and array.dtype.kind == "f":
            # What numpy makes of an empty list.
            return np.empty(0, dtype=np.int64)
        raise InvalidTypeError(f"{name} must be integers, and its dtype is {array.dtype}; convert it first")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _from_torch(values: Any, name: str) -> Any:
    try:
        return values.detach().cpu().numpy()
    except (AttributeError, RuntimeError, TypeError) as error:
        raise InvalidTypeError(f"{name} is a torch object that numpy cannot read: {error}") from error


def _from_arrow(values: Any, name: str) -> Any:
    if getattr(values, "null_count", 0):
        raise InvalidTypeError(f"{name} has {values.null_count} nulls; every sample needs an entry")
    if hasattr(values, "num_chunks"):
        values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
    if hasattr(values, "num_chunks"):
        # Older pyarrow gives a chunked array back.
        values = values.chunk(0) if values.num_chunks else np.empty(0, dtype=np.int64)
    try:
        return values.to_numpy(zero_copy_only=True) if hasattr(values, "to_numpy") else values
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"{name} is a pyarrow object that is no array of integers: {error}") from error
