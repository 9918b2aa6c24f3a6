"""What is to be shared, as numpy sees it: arrays, and tensors in host memory.

What always holds: what cannot be shared is refused here, before any memory is taken.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidTypeError
from tundish.shm.layout import Layout, Order

__all__ = ["Source", "source_of"]


@dataclass(frozen=True, slots=True)
class Source:
    """An array, and how it is to lie in shared memory."""

    array: NDArray[Any]
    layout: Layout

    def flat(self) -> NDArray[np.uint8] | None:
        """Its bytes in the layout's order; None where they do not lie so."""
        array = self.array.T if self.layout.order == "F" else self.array
        if not array.flags.c_contiguous:
            return None
        if array.nbytes == 0:
            return np.empty(0, np.uint8)
        return array.reshape(-1).view(np.uint8)


def source_of(given: Any) -> Source:
    """What `given`, an array of numpy or a tensor of torch, is to numpy."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        from tundish.shm.tensors import numpy_view_of

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
    return Source(array, Layout(shape=array.shape, order=order, dtype=array.dtype, torch_dtype=torch_dtype))
