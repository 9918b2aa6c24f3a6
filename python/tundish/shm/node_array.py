"""`NodeArray`: the read-only array that `node_shared` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tundish.shm.array_files import ArrayFile
    from tundish.shm.shared_array import SharedArray

__all__ = ["NodeArray"]


class NodeArray(np.ndarray[Any, np.dtype[Any]]):
    """A read-only numpy array whose pages all processes of a node share; see `node_shared`.

    Its pickle is its address, a few hundred bytes, so a worker that unpickles it has the same pages. Slices and results
    are pickled by value, like every numpy array.
    """

    # None in every array that numpy derives from this one.
    _backing: SharedArray | ArrayFile | None = None
    # Shape, strides and dtype in that memory. Numpy lets users change those of an array.
    _layout: tuple[Any, ...] = ()

    @classmethod
    def backed_by(cls, backing: SharedArray | ArrayFile) -> Self:
        """Return the array in `backing`, which the array keeps alive."""
        array = backing.read_only().view(cls)
        array._backing, array._layout = backing, array._current_layout()
        return array

    def _current_layout(self) -> tuple[Any, ...]:
        return self.shape, self.strides, self.dtype

    def __array_wrap__(self, array: NDArray[Any], context: Any = None, return_scalar: bool = False) -> Any:
        # The result of a computation is a plain array.
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._backing is None or self._layout != self._current_layout():
            return np.asarray(self).__reduce_ex__(protocol)
        return type(self).backed_by, (self._backing,)
