"""`ArrayLayout`: shape, order and dtype of an array, as text in the header of its segment.

Invariants:

- A layout never has a dtype of Python objects: numpy would use bytes of shared memory as pointers.
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

Order = Literal["C", "F"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayLayout:
    """Shape, order and dtype of an array.

    `torch_dtype` names a dtype that numpy lacks. Then `dtype` is an integer of the same width.
    """

    shape: tuple[int, ...]
    order: Order
    dtype: np.dtype[Any]
    torch_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype.hasobject:
            raise InvalidTypeError(
                f"the dtype {self.dtype} has Python objects, which cannot be shared: convert them to numbers or bytes"
            )
        try:
            if npy.descr_to_dtype(npy.dtype_to_descr(self.dtype)) != self.dtype:
                raise InvalidTypeError(
                    f"the dtype {self.dtype!r} cannot be shared: convert the array to a dtype of numpy"
                )
        except ValueError as error:
            raise InvalidInputError(
                f"the fields of dtype {self.dtype} are not in the order of their bytes: share "
                "numpy.lib.recfunctions.repack_fields(array)"
            ) from error
        try:
            np.broadcast_to(np.empty((), self.dtype), self.shape)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidInputError(
                f"shape is {self.shape!r:.200}, which no array can have: give at most 64 lengths from 0 on, below 2⁶³ "
                "bytes in all"
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, memory: Any) -> NDArray[Any]:
        """Return the array over `memory`, a buffer that the array keeps alive."""
        return np.ndarray(self.shape, self.dtype, buffer=memory, order=self.order)

    def to_bytes(self) -> bytes:
        """Return the layout as text for the header of a segment."""
        return repr((self.shape, self.order, npy.dtype_to_descr(self.dtype), self.torch_dtype)).encode()

    @classmethod
    def from_bytes(cls, text: bytes, nbytes: int) -> ArrayLayout:
        """Parse the layout of a segment with `nbytes` bytes of data.

        Raises:
            InvalidInputError: `text` is no layout, or the layout of another number of bytes.
        """
        try:
            shape, order, descr, torch_dtype = ast.literal_eval(text.decode())
            if order not in ("C", "F") or not isinstance(torch_dtype, str | None):
                raise ValueError("the order or the torch dtype is invalid")
            layout = cls(shape=shape, order=order, dtype=npy.descr_to_dtype(descr), torch_dtype=torch_dtype)
        except Exception as error:
            raise InvalidInputError(
                f"the segment holds no array: its layout {text!r:.200} cannot be parsed"
            ) from error
        if layout.nbytes != nbytes:
            raise InvalidInputError(f"the segment holds {nbytes} bytes, and its layout says {text!r:.200}")
        return layout
