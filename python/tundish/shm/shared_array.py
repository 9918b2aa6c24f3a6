"""`SharedArray`: an array whose memory processes of a node share."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.shm.array_input import ArrayInput, input_of
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
    def from_array(
        cls, array: NDArray[Any] | torch.Tensor, *, name: str | None = None, huge_pages: bool = False
    ) -> SharedArray:
        """Copy `array` to shared memory that nobody can write to any more.

        Args:
            array: a numpy array, or a tensor in host memory, of any shape. Its dtype and order (C or Fortran) are kept.
            name: 1 to 200 of `A-Z a-z 0-9 . _ -`. Processes of this user, on this machine or in this container, can
                attach by it once the copy is whole. The name goes with the last process that has the array; `sweep`
                removes the names that killed processes leave, and so does the first named segment of a process.
            huge_pages: ask for huge pages that the system has set aside, or else those that the kernel makes.

        Raises:
            InvalidTypeError: the dtype holds Python objects.
            OutOfMemoryError: the copy does not fit in the memory that is left. Another process may still take that at
                the same time; then the system's limits decide.
            AlreadyExistsError: a process has an array of this name.
            StorageError: `/dev/shm` has no room for a named one (ENOSPC).
        """
        source = input_of(array)
        text = source.layout.to_bytes()
        flat = source.flat()
        if flat is not None:
            segment = _native.SharedSegment.copy_of(flat, text, huge_pages, _checked(name))
        else:
            nbytes = source.layout.nbytes
            segment = _native.SharedSegment.make(nbytes, text, huge_pages, clear=False, name=_checked(name))
            _copy(source, source.layout.array(segment.writable()))
            segment.appear()
        return cls(segment, source.layout, writable=False, name=name)

    @classmethod
    def create(
        cls,
        shape: int | tuple[int, ...],
        dtype: DTypeLike,
        *,
        name: str | None = None,
        order: Order = "C",
        huge_pages: bool = False,
    ) -> SharedArray:
        """Make an array of zeros that its owner writes to while others read.

        `array` and `tensor()` are writable here, and in children that inherit them by `fork`.

        Args:
            shape: lengths of the dimensions.
            dtype: of numpy or torch.
            name: see `from_array`.
            order: `"C"` or `"F"`, of the entries in memory.
            huge_pages: see `from_array`.

        Raises:
            See `from_array`.
        """
        layout = _layout_of(shape, dtype, order)
        segment = _native.SharedSegment.make(
            layout.nbytes, layout.to_bytes(), huge_pages, clear=True, name=_checked(name)
        )
        segment.appear()
        return cls(segment, layout, writable=True, name=name)

    @classmethod
    def attach(cls, handle: Handle | str) -> SharedArray:
        """Attach to the array of a handle or a name. A process maps its memory once, however often it attaches.

        Raises:
            SegmentGoneError: its owner closed it or is dead, or this process may not look at that one.
            NotFoundError: no process has an array of this name.
        """
        if isinstance(handle, str):
            return cls._reader_of(_native.SharedSegment.attach_named(_checked(handle)), handle)
        if not isinstance(handle, Handle):
            raise InvalidTypeError(
                f"cannot attach to {type(handle).__name__}: give the handle of a SharedArray, or its name"
            )
        return cls._reader_of(handle.attach(), handle.name)

    @classmethod
    def _reader_of(cls, segment: _native.SharedSegment, name: str | None) -> SharedArray:
        return cls(segment, ArrayLayout.from_bytes(segment.layout, segment.nbytes), writable=False, name=name)

    @property
    def array(self) -> NDArray[Any]:
        """The array, read-only unless this is the owner of one that was made by `create`."""
        segment = self._open()
        if self._layout.torch_dtype is not None:
            raise InvalidTypeError(
                f"numpy has no {self._layout.torch_dtype}: ask for tensor() instead of array"
            )
        if self._array is None:
            self._array = self._layout.array(segment.writable() if self._writable else segment.readonly())
        return self._array

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
        return Handle(self._open().address, self._name)

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
        return (_attached, (self.handle,))

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
        # Of these some cannot even be handed on.
        raise InvalidInputError(f"{name!a} cannot name a segment: give 1 to 200 of A-Z a-z 0-9 . _ -")
    return name


def _attached(handle: Handle) -> SharedArray:
    return SharedArray.attach(handle)


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
    lengths = (shape,) if not isinstance(shape, tuple | list) else tuple(shape)
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int | np.integer):
            raise InvalidTypeError(f"shape is {shape!r}: give integers")
        if length < 0:
            raise InvalidInputError(f"shape is {shape!r}: lengths start at 0")
    return ArrayLayout(shape=tuple(map(int, lengths)), order=order, dtype=numpy_dtype, torch_dtype=torch_name)


def _copy(source: ArrayInput, target: NDArray[Any]) -> None:
    rows = max(1, _COPIED_AT_ONCE * len(target) // max(1, target.nbytes)) if target.ndim else 1
    if not target.ndim:
        np.copyto(target, source.array)
    for start in range(0, len(target) if target.ndim else 0, rows):
        np.copyto(target[start : start + rows], source.array[start : start + rows])
