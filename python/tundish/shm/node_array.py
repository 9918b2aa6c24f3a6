"""`NodeArray`: the read-only array that `node_shared` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tundish.shm.file_backed_array import FileBackedArray
    from tundish.shm.shared_array import SharedArray

__all__ = ["NodeArray"]


class NodeArray(np.ndarray[Any, np.dtype[Any]]):
    """A read-only numpy array whose pages all processes of a node share; see `node_shared`.

    It is pickled as its place, some hundred bytes, so a worker that unpickles it has the same pages. Slices and results
    are pickled by their values, as every numpy array.
    """

    # None on every array that numpy makes of this one.
    _origin: SharedArray | FileBackedArray | None = None
    # Shape, strides and dtype at that place: numpy lets an array be given others.
    _form: tuple[Any, ...] = ()

    @classmethod
    def of(cls, origin: SharedArray | FileBackedArray) -> Self:
        """Return the array at `origin`, which lives as long as the array."""
        array = origin.read_only().view(cls)
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
