"""`SharedArray`: an array whose memory processes of a node share."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.shm.array_input import input_of
from tundish.shm.array_layout import ArrayLayout, Order
from tundish.shm.handle import Handle

if TYPE_CHECKING:
    import torch

__all__ = ["SharedArray"]

# Bytes that numpy copies at once, some tens of milliseconds: Ctrl-C waits as long.
_COPIED_AT_ONCE = 64 << 20


class SharedArray:
    """An array in shared memory, as this process has it: as its owner, which made it, or as a reader.

    Made by `from_array`, `create` or `attach`. As a context manager it closes at the end. A process that unpickles one
    attaches to the same memory.

    Example:
        >>> import numpy as np
        >>> import tundish as td
        >>> with td.shm.SharedArray.from_array(np.arange(4)) as shared:
        ...     with td.shm.SharedArray.attach(shared.handle) as seen:      # in another process
        ...         seen.array.tolist()
        [0, 1, 2, 3]
    """

    def __init__(
        self, segment: _native.SharedSegment, layout: ArrayLayout, *, writable: bool, name: str | None
    ) -> None:
        self._segment: _native.SharedSegment | None = segment
        self._name = name
        self._layout = layout
        self._writable = writable
        self._array: NDArray[Any] | None = None

    @classmethod
    def from_array(cls, array: NDArray[Any] | torch.Tensor, *, name: str | None = None) -> SharedArray:
        """Copy `array` to shared memory, which no process can write to any more.

        Args:
            array: numpy array, or tensor in host memory, of any shape. Its dtype and order (C or Fortran) are kept.
            name: 1 to 200 of `A-Z a-z 0-9 . _ -`. Processes of this user, on this machine or in this container, can
                attach by it once the copy is whole. The name goes with the last process that has the array. `sweep`
                removes the names that killed processes leave, and so does the first named segment of a process.

        Raises:
            InvalidTypeError: the dtype holds Python objects.
            InvalidInputError: the fields of the dtype are not in the order of their bytes.
            OutOfMemoryError: the copy does not fit in the memory that is left. Another process may still take that at
                the same time; then the system's limits decide.
            AlreadyExistsError: a process has an array of this name.
            StorageError: `/dev/shm` has no room for a named array (ENOSPC).
        """
        values, layout = input_of(array)
        text = layout.to_bytes()
        stored = values.T if layout.order == "F" else values
        if stored.flags.c_contiguous:
            flat = stored.reshape(-1).view(np.uint8) if layout.nbytes else np.empty(0, np.uint8)
            segment = _native.SharedSegment.copy_of(flat, text, _checked(name))
        else:
            segment = _native.SharedSegment.make(layout.nbytes, text, clear=False, name=_checked(name))
            _copy(values, layout.array(segment.writable()))
            segment.appear()
        return cls(segment, layout, writable=False, name=name)

    @classmethod
    def create(
        cls, shape: int | tuple[int, ...], dtype: DTypeLike, *, name: str | None = None, order: Order = "C"
    ) -> SharedArray:
        """Make an array of zeros that its owner writes to while others read.

        `array` and `tensor()` are writable here, and in children that inherit them by `fork`.

        Args:
            shape: lengths of the dimensions.
            dtype: dtype of numpy or torch.
            name: see `from_array`.
            order: `"C"` or `"F"`, order of the entries in memory.

        Raises:
            See `from_array`.
        """
        layout = _layout_of(shape, dtype, order)
        segment = _native.SharedSegment.make(
            layout.nbytes, layout.to_bytes(), clear=True, name=_checked(name)
        )
        segment.appear()
        return cls(segment, layout, writable=True, name=name)

    @classmethod
    def attach(cls, handle: Handle | str) -> SharedArray:
        """Attach to the array of a handle or a name. A process maps its memory once, however often it attaches.

        Raises:
            SegmentGoneError: its owner closed it or is dead, or this process may not look at that one.
            NotFoundError: no process has an array of this name.
            InvalidInputError: the segment holds no array, or the name cannot be one.
        """
        if isinstance(handle, str):
            segment = _native.SharedSegment.attach_named(_checked(handle))
        elif isinstance(handle, Handle):
            segment = handle.attach()
        else:
            raise InvalidTypeError(
                f"cannot attach to {type(handle).__name__}: give the handle of a SharedArray, or its name"
            )
        layout = ArrayLayout.from_bytes(segment.layout, segment.nbytes)
        name = handle if isinstance(handle, str) else handle.name
        return cls(segment, layout, writable=False, name=name)

    @property
    def array(self) -> NDArray[Any]:
        """The array, read-only unless this is the owner of one that was made by `create`."""
        if self._array is None:
            segment = self._open()
            self._array = self._numpy_array(segment.writable() if self._writable else segment.readonly())
        return self._array

    def read_only(self) -> NDArray[Any]:
        """Return the array, read-only also for the owner of one that was made by `create`."""
        return self._numpy_array(self._open().readonly())

    def tensor(self) -> torch.Tensor:
        """Return the array as a tensor.

        Torch has no read-only tensors. The owner of an array that was made by `create` gets the shared memory. Others
        get a private map of it, a new one by each call: pages are shared until they are written to, and what is written
        stays in this process.
        """
        from tundish.shm.tensor_conversion import tensor_in

        segment = self._open()
        return tensor_in(self._layout, segment.writable() if self._writable else segment.private())

    @property
    def handle(self) -> Handle:
        """Leads other processes to the array as long as this is open."""
        return Handle(*self._open().address, self._name)

    @property
    def name(self) -> str | None:
        """The name that others can attach by."""
        return self._name

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self._layout.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._layout.shape

    def close(self) -> None:
        """Close this object. Arrays and tensors that it returned stay; the memory goes with the last of them."""
        self._segment = None
        self._array = None

    def _numpy_array(self, memory: _native.SegmentView) -> NDArray[Any]:
        if self._layout.torch_dtype is not None:
            raise InvalidTypeError(
                f"numpy has no {self._layout.torch_dtype}: ask for tensor() instead of array"
            )
        return self._layout.array(memory)

    def _open(self) -> _native.SharedSegment:
        if self._segment is None:
            raise InvalidInputError("the SharedArray is closed: attach to it again, or keep it open")
        return self._segment

    def __enter__(self) -> SharedArray:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedArray.attach, (self.handle,)

    def __repr__(self) -> str:
        if self._segment is None:
            return "<SharedArray, closed>"
        role = "owner" if self._segment.is_owner else "reader"
        dtype = self._layout.torch_dtype or self._layout.dtype
        return f"<SharedArray {self._layout.shape} {dtype}, {role}>"


def _checked(name: Any) -> Any:
    if name is not None and not isinstance(name, str):
        raise InvalidTypeError(f"name is {name!r}: give a str, or None for an array without a name")
    if name is not None and not name.isascii():
        raise InvalidInputError(f"{name!a} cannot name a segment: give 1 to 200 of A-Z a-z 0-9 . _ -")
    return name


def _layout_of(shape: int | tuple[int, ...], dtype: Any, order: Order) -> ArrayLayout:
    if order not in ("C", "F"):
        raise InvalidInputError(f"order is {order!r}: give 'C' or 'F'")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        from tundish.shm.tensor_conversion import numpy_dtype_of

        numpy_dtype, torch_name = numpy_dtype_of(dtype)
    else:
        try:
            numpy_dtype, torch_name = np.dtype(dtype), None
        except TypeError as error:
            raise InvalidTypeError(f"dtype is {dtype!r}, which is none: {error}") from error
    lengths = shape if isinstance(shape, tuple | list) else (shape,)
    if not all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in lengths):
        raise InvalidTypeError(f"shape is {shape!r}: give integers")
    return ArrayLayout(shape=tuple(map(int, lengths)), order=order, dtype=numpy_dtype, torch_dtype=torch_name)


def _copy(values: NDArray[Any], target: NDArray[Any]) -> None:
    rows = max(1, _COPIED_AT_ONCE * len(target) // target.nbytes)
    for start in range(0, len(target), rows):
        np.copyto(target[start : start + rows], values[start : start + rows])
