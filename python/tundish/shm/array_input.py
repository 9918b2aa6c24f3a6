"""Views what a caller wants to share, an array or a tensor in host memory, as a numpy array with a layout."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidTypeError
from tundish.shm.array_layout import ArrayLayout, Order

__all__ = ["ArrayInput", "input_of"]


@dataclass(frozen=True, slots=True)
class ArrayInput:
    """An array, and its layout in shared memory."""

    array: NDArray[Any]
    layout: ArrayLayout

    def flat(self) -> NDArray[np.uint8] | None:
        """Return its bytes in the order of the layout; None where they lie in another order."""
        array = self.array.T if self.layout.order == "F" else self.array
        if not array.flags.c_contiguous:
            return None
        if array.nbytes == 0:
            return np.empty(0, np.uint8)
        return array.reshape(-1).view(np.uint8)


def input_of(given: Any) -> ArrayInput:
    """View `given`, a numpy array or a torch tensor.

    Raises:
        InvalidTypeError: it cannot be shared.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        from tundish.shm.tensor_conversion import numpy_view_of

        array, torch_dtype = numpy_view_of(given)
    elif isinstance(given, np.ma.MaskedArray):
        raise InvalidTypeError("a masked array cannot be shared: share its data and its mask")
    elif isinstance(given, np.ndarray):
        array, torch_dtype = given.view(np.ndarray), None
    else:
        raise InvalidTypeError(
            f"cannot share {type(given).__name__}: give an array of numpy or a tensor in host memory"
        )
    order: Order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return ArrayInput(
        array, ArrayLayout(shape=array.shape, order=order, dtype=array.dtype, torch_dtype=torch_dtype)
    )
