"""`SharedArray`: an array whose memory processes of a node share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, SegmentGoneError, format_type
from tundish.shm.array_layout import ArrayLayout, Order

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Handle:
    """The address of a segment; small and picklable. `SharedArray.attach` takes it.

    A handle owns no memory. It works while its process has a `SharedArray` of the segment open. Other processes attach
    through `/proc/<process>/fd`, which the kernel opens to the same user, or by the segment's name.

    Args:
        process: id of a process that has the segment open.
        descriptor: the segment's file descriptor in that process.
        identity: random number of the segment.
        generation: count of the arrays that the segment has held; its memory is used again for other arrays.
        name: name of the segment, or None.

    Example:
        >>> import pickle
        >>> import numpy as np
        >>> import tundish as td
        >>> shared = td.shm.SharedArray.from_array(np.arange(4))
        >>> message = pickle.dumps(shared.handle)
        >>> td.shm.SharedArray.attach(pickle.loads(message)).array.tolist()      # in another process
        [0, 1, 2, 3]
    """

    process: int
    descriptor: int
    identity: int
    generation: int
    name: str | None = None


# Numpy copies so many bytes at once, in some tens of milliseconds. Ctrl-C ends the copying between two of these.
_COPY_BYTES = 64 << 20


class SharedArray:
    """An array in shared memory. A process is its owner if it made the array, else a reader.

    Make one with `from_array` or `create`, or attach to one with `attach`. It is a context manager, which closes it. A
    process that unpickles it attaches to the same memory.

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
        """Copy `array` to shared memory. No process can write to the copy.

        Args:
            array: numpy array or CPU tensor of any shape. Its dtype and order (C or Fortran) are kept.
            name: 1 to 200 of `A-Z a-z 0-9 . _ -`, or None. Processes of this user on this machine, or in this
                container, can attach by the name once the copy is complete. The last process that has the array
                removes the name. `sweep` removes names that killed processes left.

        Returns:
            The shared array. This process owns it.

        Raises:
            InvalidTypeError: the dtype has Python objects.
            InvalidInputError: the name is invalid, or the fields of the dtype are not in the order of their bytes.
            OutOfMemoryError: the copy does not fit in the memory that is left. If another process takes that memory at
                the same time, the kernel may kill a process instead.
            AlreadyExistsError: a process has an array of this name.
            StorageError: `/dev/shm` has no room for a named array (ENOSPC).

        Example:
            >>> import numpy as np
            >>> import tundish as td
            >>> td.shm.SharedArray.from_array(np.arange(4)).array.tolist()
            [0, 1, 2, 3]
        """
        values, layout = as_numpy(array)
        text = layout.to_bytes()
        stored = values.T if layout.order == "F" else values
        if stored.flags.c_contiguous:
            flat = stored.reshape(-1).view(np.uint8) if layout.nbytes else np.empty(0, np.uint8)
            segment = _native.SharedSegment.copy_of(flat, text, _checked(name))
        else:
            segment = _native.SharedSegment.make(layout.nbytes, text, clear=False, name=_checked(name))
            _copy(values, layout.array(segment.writable()))
            segment.publish_name()
        return cls(segment, layout, writable=False, name=name)

    @classmethod
    def create(
        cls, shape: int | tuple[int, ...], dtype: DTypeLike, *, name: str | None = None, order: Order = "C"
    ) -> SharedArray:
        """Make an array of zeros to which its owner writes while others read.

        `array` and `tensor()` are writable in this process, and in children that inherit them by `fork`.

        Args:
            shape: lengths of the dimensions.
            dtype: dtype of numpy or torch.
            name: see `from_array`.
            order: order of the entries in memory, `"C"` or `"F"` (Fortran).

        Returns:
            The shared array. This process owns it.

        Raises:
            InvalidTypeError: shape, dtype or name has a wrong type, or the dtype has Python objects.
            InvalidInputError: a length, the order or the name is invalid.
            OutOfMemoryError, AlreadyExistsError, StorageError: as for `from_array`.

        Example:
            >>> import numpy as np
            >>> import tundish as td
            >>> shared = td.shm.SharedArray.create((2, 3), np.float32)
            >>> shared.array[:] = 0.5
            >>> float(td.shm.SharedArray.attach(shared.handle).array.sum())      # in another process
            3.0
        """
        layout = _layout_of(shape, dtype, order)
        segment = _native.SharedSegment.make(
            layout.nbytes, layout.to_bytes(), clear=True, name=_checked(name)
        )
        segment.publish_name()
        return cls(segment, layout, writable=True, name=name)

    @classmethod
    def attach(cls, handle: Handle | str) -> SharedArray:
        """Attach to the array of another process. Its memory is mapped once, however often this process attaches.

        Args:
            handle: `SharedArray.handle` of the other process, or the name of the array.

        Returns:
            The shared array, read-only.

        Raises:
            SegmentGoneError: the process of the handle has closed the array, has ended, or has another user.
            NotFoundError: no process has an array of this name.
            InvalidInputError: the name is invalid, or the segment holds no array.
            InvalidTypeError: `handle` is neither a handle nor a str.

        Example:
            >>> import numpy as np
            >>> import tundish as td
            >>> with td.shm.SharedArray.from_array(np.arange(4), name="example"):
            ...     td.shm.SharedArray.attach("example").array.tolist()      # in another process
            [0, 1, 2, 3]
        """
        if isinstance(handle, str):
            segment = _attached_by_name(_checked(handle))
        elif isinstance(handle, Handle):
            address = handle.process, handle.descriptor, handle.identity, handle.generation
            segment = _native.SharedSegment.attach(address, name=handle.name)
        else:
            raise InvalidTypeError(
                f"cannot attach to {format_type(handle)}: give the handle of a SharedArray, or its name"
            )
        layout = ArrayLayout.from_bytes(segment.layout, segment.nbytes)
        name = handle if isinstance(handle, str) else handle.name
        return cls(segment, layout, writable=False, name=name)

    @property
    def array(self) -> NDArray[Any]:
        """The numpy array: writable for the owner of an array that was made by `create`, else read-only.

        Raises:
            InvalidTypeError: numpy lacks the dtype; use `tensor()`.
            InvalidInputError: the shared array is closed.
        """
        if self._array is None:
            segment = self._open()
            self._array = self._numpy_array(segment.writable() if self._writable else segment.readonly())
        return self._array

    def read_only(self) -> NDArray[Any]:
        """Return the numpy array, always read-only.

        Returns:
            The array, over the shared memory.

        Raises:
            InvalidTypeError, InvalidInputError: as for `array`.

        Example:
            >>> import numpy as np
            >>> import tundish as td
            >>> td.shm.SharedArray.create(3, np.int32).read_only().flags.writeable
            False
        """
        return self._numpy_array(self._open().readonly())

    def tensor(self) -> torch.Tensor:
        """Return the array as a CPU tensor.

        Torch has no read-only tensors. The owner of an array that was made by `create` gets the shared memory. All
        others get a private map of it, a new one in each call. Its pages are shared until this process writes to them;
        other processes do not see the change.

        Returns:
            The tensor, with the shape and dtype of the array.

        Raises:
            InvalidTypeError: torch lacks the dtype; use `array`.
            InvalidInputError: the shared array is closed.

        Example:
            >>> import numpy as np
            >>> import tundish as td
            >>> td.shm.SharedArray.from_array(np.arange(3)).tensor()
            tensor([0, 1, 2])
        """
        from tundish.shm.tensor_conversion import tensor_in

        segment = self._open()
        return tensor_in(self._layout, segment.writable() if self._writable else segment.private())

    @property
    def handle(self) -> Handle:
        """The address with which other processes attach, as long as this object is open."""
        return Handle(*self._open().address, self._name)

    @property
    def name(self) -> str | None:
        """The name by which other processes can attach, or None."""
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
        """Close this object. Arrays and tensors that it returned stay valid; the memory is freed with the last one.

        Example:
            >>> import numpy as np
            >>> import tundish as td
            >>> shared = td.shm.SharedArray.from_array(np.arange(3))
            >>> array = shared.array
            >>> shared.close()
            >>> array.tolist()
            [0, 1, 2]
        """
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedArray.attach, (self.handle,)

    def __repr__(self) -> str:
        if self._segment is None:
            return "<SharedArray, closed>"
        role = "owner" if self._segment.is_owner else "reader"
        dtype = self._layout.torch_dtype or self._layout.dtype
        return f"<SharedArray {self._layout.shape} {dtype}, {role}>"


def _attached_by_name(name: str) -> _native.SharedSegment:
    try:
        return _native.SharedSegment.attach_named(name)
    except SegmentGoneError:
        raise
    except NotFoundError as error:
        raise NotFoundError(
            error.errno,
            f"there is no segment {error.filename}: make an array with the name {name!r} first, and keep it open until "
            "the others have attached",
            error.filename,
        ) from None


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
            raise InvalidTypeError(f"dtype is {dtype!r}: {error}") from error
    lengths = shape if isinstance(shape, tuple | list) else (shape,)
    if not all(isinstance(length, int | np.integer) and not isinstance(length, bool) for length in lengths):
        raise InvalidTypeError(f"shape is {shape!r}: give integers")
    return ArrayLayout(shape=tuple(map(int, lengths)), order=order, dtype=numpy_dtype, torch_dtype=torch_name)


def _copy(values: NDArray[Any], target: NDArray[Any]) -> None:
    rows = max(1, _COPY_BYTES * len(target) // target.nbytes)
    for start in range(0, len(target), rows):
        np.copyto(target[start : start + rows], values[start : start + rows])


def as_numpy(given: Any) -> tuple[NDArray[Any], ArrayLayout]:
    """Return a view of `given`, a numpy array or a CPU tensor, and its layout in shared memory.

    Raises:
        InvalidTypeError: `given` cannot be shared.
    """
    torch = sys.modules.get("torch")
    torch_dtype = None
    if torch is not None and isinstance(given, torch.Tensor):
        from tundish.shm.tensor_conversion import numpy_view_of

        array, torch_dtype = numpy_view_of(given)
    elif isinstance(given, np.ma.MaskedArray):
        raise InvalidTypeError("a masked array cannot be shared: share its data and its mask")
    elif isinstance(given, np.ndarray):
        array = given.view(np.ndarray)
    else:
        raise InvalidTypeError(f"cannot share {format_type(given)}: give a numpy array or a CPU tensor")
    order: Order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return array, ArrayLayout(shape=array.shape, order=order, dtype=array.dtype, torch_dtype=torch_dtype)
