"""Converts the array or tensor that a caller wants to share to a numpy array with a layout."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidTypeError, format_type
from tundish.shm.array_layout import ArrayLayout, Order

__all__ = ["as_numpy"]


def as_numpy(given: Any) -> tuple[NDArray[Any], ArrayLayout]:
    """Return a view of `given`, a numpy array or a CPU tensor, and its layout in shared memory.

    Raises:
        InvalidTypeError: `given` cannot be shared.
    """
    torch = sys.modules.get("torch")
    torch_dtype = None
    if torch is not None and isinstance(given, torch.Tensor):
        from tundish.shm.tensor_conversion import numpy_view_of

        array, torch_dtype = numpy_view_of(given)
    elif isinstance(given, np.ma.MaskedArray):
        raise InvalidTypeError("a masked array cannot be shared: share its data and its mask")
    elif isinstance(given, np.ndarray):
        array = given.view(np.ndarray)
    else:
        raise InvalidTypeError(f"cannot share {format_type(given)}: give a numpy array or a CPU tensor")
    order: Order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return array, ArrayLayout(shape=array.shape, order=order, dtype=array.dtype, torch_dtype=torch_dtype)
