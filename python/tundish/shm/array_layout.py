"""`ArrayLayout`: shape, order and dtype of an array, as text in the header of its segment.

Invariants:

- A layout never describes an array of Python objects: numpy would take bytes of shared memory for pointers.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["ArrayLayout", "Order"]

Order = Literal["C", "F"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayLayout:
    """An array of `shape`, in C or Fortran order.

    `torch_dtype` names the dtype of a tensor that numpy has none for; `dtype` then is an integer of its width.
    """

    shape: tuple[int, ...]
    order: Order
    dtype: np.dtype[Any]
    torch_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype.hasobject:
            raise InvalidTypeError(
                f"the dtype {self.dtype} holds Python objects, which live in one process only: share their values as "
                "numbers or bytes"
            )
        try:
            if npy.descr_to_dtype(npy.dtype_to_descr(self.dtype)) != self.dtype:
                raise InvalidTypeError(
                    f"the dtype {self.dtype!r} cannot be shared: convert the array to one of numpy's own"
                )
        except ValueError as error:
            raise InvalidInputError(
                f"the fields of dtype {self.dtype} are not in the order of their bytes: bring "
                "numpy.lib.recfunctions.repack_fields(array)"
            ) from error
        try:
            np.broadcast_to(np.empty((), self.dtype), self.shape)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidInputError(f"numpy has no array of shape {self.shape!r:.200}: {error}") from error

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, memory: Any) -> NDArray[Any]:
        """Return the array in `memory`, a buffer that the array keeps alive."""
        return np.ndarray(self.shape, self.dtype, buffer=memory, order=self.order)

    def to_bytes(self) -> bytes:
        """Return the layout as the header of a segment holds it."""
        return repr((self.shape, self.order, npy.dtype_to_descr(self.dtype), self.torch_dtype)).encode()

    @classmethod
    def from_bytes(cls, text: bytes, nbytes: int) -> ArrayLayout:
        """Read the layout of a segment with `nbytes` of data.

        Raises:
            InvalidInputError: `text` is no layout, or one of other bytes.
        """
        try:
            shape, order, descr, torch_dtype = ast.literal_eval(text.decode())
            if order not in ("C", "F") or not isinstance(torch_dtype, str | None):
                raise ValueError("the order or torch's dtype is none")
            layout = cls(shape=shape, order=order, dtype=npy.descr_to_dtype(descr), torch_dtype=torch_dtype)
        except Exception as error:
            raise InvalidInputError(
                f"the segment holds no array: its layout {text!r:.200} cannot be read"
            ) from error
        if layout.nbytes != nbytes:
            raise InvalidInputError(f"the segment holds {nbytes} bytes, and its layout says {text!r:.200}")
        return layout
