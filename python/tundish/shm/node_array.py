"""`NodeArray`: the array that `node_shared` hands out.

What always holds: it is read-only; pickled as a whole it is some hundred bytes that say where it lies, so that a worker
which unpickles it has the same pages; any other array that is made from it, a slice or a sum, is pickled by its values,
as every array of numpy.
"""

from __future__ import annotations

from typing import Any, Protocol, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

__all__ = ["NodeArray", "Origin"]


class Origin(Protocol):
    """Where a shared array lies; picklable, and small then."""

    def mapped(self) -> NDArray[Any]:
        """The array, read-only."""
        ...


class NodeArray(np.ndarray[Any, np.dtype[Any]]):
    """A read-only numpy array whose pages all processes of a node share; see `node_shared`."""

    # None on every array that numpy makes of this one.
    _origin: Origin | None = None
    # As it lies there: numpy lets an array be given another shape or dtype in its place.
    _form: tuple[Any, ...] = ()

    @classmethod
    def of(cls, origin: Origin) -> Self:
        """The array that lies at `origin`, which lives as long as the array."""
        array = origin.mapped().view(cls)
        array.flags.writeable = False
        array._origin, array._form = origin, array._form_now()
        return array

    def _form_now(self) -> tuple[Any, ...]:
        return self.shape, self.strides, self.dtype

    def __array_wrap__(self, array: NDArray[Any], context: Any = None, return_scalar: bool = False) -> Any:
        # What is computed from a shared array is nobody else's.
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._origin is None or self._form != self._form_now():
            return np.asarray(self).__reduce_ex__(protocol)
        return type(self).of, (self._origin,)
