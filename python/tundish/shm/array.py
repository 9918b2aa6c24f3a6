"""Arrays in shared memory.

A `SharedArray` is this process's part in one: its owner's, who made it, or a reader's, who attached to it. What
always holds: an array or tensor that was given out keeps its memory, whatever is closed; a reader cannot change what
others see.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.shm.handle import Handle
from tundish.shm.layout import Layout, Order
from tundish.shm.source import Source, source_of

if TYPE_CHECKING:
    import torch

__all__ = ["SharedArray"]

# Bytes that numpy copies between two looks at signals, some tens of milliseconds.
_COPIED_AT_ONCE = 64 << 20


class SharedArray:
    """An array whose memory processes share. Made by `from_array`, `create` or `attach`; a context manager that closes.

    Pickled, it becomes an attached one in the process that unpickles it.
    """

    def __init__(
        self, segment: _native.SharedSegment, layout: Layout, *, writable: bool, name: str | None
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
        """A copy of `array`, of numpy or a tensor in host memory, in shared memory that nobody can write to any more.

        Dtype, shape and the order of Fortran are kept. `huge_pages` asks for those that the system has set aside, else
        for those that the kernel makes of shared memory where it is told to; where there are neither, pages are small.

        With a `name` (1 to 200 of `A-Z a-z 0-9 . _ -`) every process of this user, on this machine or in this
        container, can attach to it by that, from when the copy is whole. The name is there as long as a process has the
        array, and goes with the last one; what killed processes leave is removed by `sweep`, and by the first segment
        with a name that a process makes.

        Raises `InvalidTypeError` where the dtype holds Python objects, and `OutOfMemoryError` where the copy does not
        fit in the memory that is left: another process may still take that at the same time, and then the system's
        limits decide. With a name, `AlreadyExistsError` where a process has an array of that name, and `StorageError`
        (ENOSPC) where `/dev/shm` has no room.
        """
        source = source_of(array)
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
        """Zeros, which their owner writes to while others read.

        `array` and `tensor` are writable here and in children that inherit them by `fork`. `dtype` may be one of
        torch's. For the rest see `from_array`.
        """
        layout = _layout_of(shape, dtype, order)
        segment = _native.SharedSegment.make(
            layout.nbytes, layout.to_bytes(), huge_pages, clear=True, name=_checked(name)
        )
        segment.appear()
        return cls(segment, layout, writable=True, name=name)

    @classmethod
    def attach(cls, handle: Handle | str) -> SharedArray:
        """The array that `handle` leads to, or of this name; however often, its memory is mapped once in a process.

        Where a process can neither reach the memory nor take another descriptor, it gets a copy of its own, and a
        warning in the log `tundish.shm`.

        Raises `SegmentGoneError` where its owner closed it or is dead, and for a name that no process has an array of,
        `NotFoundError`.
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
        return cls(segment, Layout.from_bytes(segment.layout, segment.nbytes), writable=False, name=name)

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
        """The array as a tensor.

        Torch knows no read-only tensors. To the owner of what was made by `create` it is the shared memory; to all
        others a private map of it, made anew by each call: pages are shared until they are written to, and what is
        written stays in this process.
        """
        from tundish.shm.tensors import tensor_in

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
        """Let go of it. Arrays and tensors that were given out stay; the memory goes with the last of them."""
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


def _layout_of(shape: int | tuple[int, ...], dtype: Any, order: Order) -> Layout:
    if order not in ("C", "F"):
        raise InvalidInputError(f"order is {order!r}: give 'C' or 'F'")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        from tundish.shm.tensors import numpy_dtype_of

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
    return Layout(shape=tuple(map(int, lengths)), order=order, dtype=numpy_dtype, torch_dtype=torch_name)


def _copy(source: Source, target: NDArray[Any]) -> None:
    rows = max(1, _COPIED_AT_ONCE * len(target) // max(1, target.nbytes)) if target.ndim else 1
    if not target.ndim:
        np.copyto(target, source.array)
    for start in range(0, len(target) if target.ndim else 0, rows):
        np.copyto(target[start : start + rows], source.array[start : start + rows])
