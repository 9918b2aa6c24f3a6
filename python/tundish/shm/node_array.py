"""`NodeArray`: the array that `node_shared` returns.

It is read-only. Pickled as a whole it is its place, some hundred bytes, so a worker that unpickles it has the same
pages. An array that is made from it, a slice or a sum, is pickled by its values, as every numpy array.
"""

from __future__ import annotations

from typing import Any, Protocol, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

__all__ = ["NodeArray", "Origin"]


class Origin(Protocol):
    """The place of a shared array; picklable and small."""

    def mapped(self) -> NDArray[Any]:
        """Return the array, read-only."""
        ...


class NodeArray(np.ndarray[Any, np.dtype[Any]]):
    """A read-only numpy array whose pages all processes of a node share; see `node_shared`."""

    # None on every array that numpy makes of this one.
    _origin: Origin | None = None
    # Shape, strides and dtype at that place: numpy lets an array be given others.
    _form: tuple[Any, ...] = ()

    @classmethod
    def of(cls, origin: Origin) -> Self:
        """Return the array at `origin`, which lives as long as the array."""
        array = origin.mapped().view(cls)
        array.flags.writeable = False
        array._origin, array._form = origin, array._form_now()
        return array

    def _form_now(self) -> tuple[Any, ...]:
        return self.shape, self.strides, self.dtype

    def __array_wrap__(self, array: NDArray[Any], context: Any = None, return_scalar: bool = False) -> Any:
        # The result of a computation is a plain array.
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._origin is None or self._form != self._form_now():
            return np.asarray(self).__reduce_ex__(protocol)
        return type(self).of, (self._origin,)
