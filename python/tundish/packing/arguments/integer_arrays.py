"""Arguments as one-dimensional integer arrays, without a copy wherever the memory already is one.

Owns the conversion of lengths and orders from what users hold (numpy, torch, pyarrow, plain sequences) to
numpy. What always holds: the result is one-dimensional, of a native integer dtype, and nothing was rounded,
wrapped or turned into a Python list on the way; where it lies in a mapped file, the file had all of it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, StorageError, shown

# More is a slip of the pen: no machine that this was written for has as many processors.
MOST_THREADS = 512

IntegerArray = NDArray[np.integer[Any]]

_BOOLEANS = frozenset({bool, np.bool_})
_NEEDED = "give an array or a sequence of integers, one a sample"


def as_integer_column(values: Any, name: str) -> IntegerArray:
    """`values` as a 1-D numpy array of integers, shape (n,).

    Args:
        values: a numpy array (strided or memory-mapped), a torch tensor, a pyarrow array, a column of a HF
            `Dataset`, or a sequence of Python integers. Only a chunked pyarrow array of several chunks, a tensor on a
            device, a column, a sequence and an array of foreign byte order are copied.
        name: what the argument is called, for messages.

    Raises:
        InvalidTypeError: floats, booleans, objects, nulls: anything that is no integer.
        InvalidInputError: another number of dimensions than one.
        StorageError: the array is mapped from a file that was truncated since.
    """
    package = type(values).__module__.partition(".")[0]
    if package == "datasets" and type(values).__name__ == "Column":
        # What `dataset["length"]` is: each entry of it alone is a query, all together are one.
        values = values[:]
        package = type(values).__module__.partition(".")[0]
    if package == "torch":
        values = _from_torch(values, name)
    elif package == "pyarrow":
        values = _from_arrow(values, name)
    elif isinstance(values, np.ma.MaskedArray):
        raise InvalidTypeError(f"{name} is a masked array; fill or drop the masked entries first")
    elif isinstance(values, bytes | bytearray):
        raise InvalidTypeError(
            f"{name} is of type {type(values).__name__}, whose bytes are no numbers of tokens; {_NEEDED}"
        )
    try:
        # A memory map stays one, and so does an array of `node_shared`, to be pickled as what they are.
        array: IntegerArray = np.asanyarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        _check_entries(values, name)
        raise InvalidTypeError(f"{name} cannot be read as an array of integers: {error}") from error
    if array.ndim == 0 and array.dtype.kind not in "biufc":
        # What numpy takes for one object: a mapping, a set, a generator, a text, None.
        raise InvalidTypeError(f"{name} is of type {type(values).__name__}; {_NEEDED}")
    if array.ndim != 1:
        raise InvalidInputError(f"{name} must have one dimension; its shape is {array.shape}")
    if array.dtype.kind not in "iu":
        if array.size == 0 and array.dtype.kind == "f":
            # What numpy makes of an empty list.
            return np.empty(0, dtype=np.int64)
        _check_entries(values, name)
        raise InvalidTypeError(f"{name} must be integers, and its dtype is {array.dtype}; convert it first")
    if isinstance(values, list | tuple) and not _BOOLEANS.isdisjoint(map(type, values)):
        # Beside integers numpy takes them for such.
        _check_entries(values, name)
    _check_file_of(array, name)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _check_entries(values: Any, name: str) -> None:
    """Name the entry of a sequence for which numpy could not make integers of it, if there is one."""
    if isinstance(values, np.ndarray) or not hasattr(values, "__len__"):
        return
    for position, value in enumerate(values):
        if type(value) in _BOOLEANS or not isinstance(value, int | np.integer):
            kind = type(value).__name__
            raise InvalidTypeError(f"{name}[{position}] is of type {kind}; it must be one integer")
        if not -(2**63) <= value < 2**63:
            raise InvalidInputError(f"{name}[{position}] is {shown(int(value))}, beyond what int64 holds")


def _check_file_of(array: IntegerArray, name: str) -> None:
    """Refuse what is mapped from a file that no longer has it: reading that would end the process (SIGBUS)."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and not _is_map(owner):
        owner = owner.base
    if not _is_map(owner) or not len(array):
        return
    try:
        # Of the open file, which another one may have replaced under its name.
        size = owner.base.size()
    except (OSError, ValueError):
        return
    behind = max(array.strides[0], 0) * (len(array) - 1) + array.itemsize
    needed = owner.offset + array.ctypes.data - owner.ctypes.data + behind
    if size < needed:
        raise _shortened(owner.filename, f"{name} needs {needed} bytes of it, and it has {size}")


def _is_map(array: Any) -> bool:
    # A view of a map is of the same class, and has the map, or another view, as its base.
    return isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap)


def _shortened(path: Any, reason: str) -> StorageError:
    where = "a file that has no name any more" if path is None else str(path)
    return StorageError(errno.EIO, f"was truncated after it was mapped: {reason}; write it again", where)


def _from_torch(values: Any, name: str) -> Any:
    try:
        return values.detach().cpu().numpy()
    except (AttributeError, RuntimeError, TypeError) as error:
        raise InvalidTypeError(f"{name} is a torch object that numpy cannot read: {error}") from error


def _from_arrow(values: Any, name: str) -> Any:
    if getattr(values, "null_count", 0):
        raise InvalidTypeError(f"{name} has {values.null_count} nulls; every sample needs an entry")
    if hasattr(values, "num_chunks"):
        values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
    if hasattr(values, "num_chunks"):
        # Older pyarrow gives a chunked array back.
        values = values.chunk(0) if values.num_chunks else np.empty(0, dtype=np.int64)
    try:
        return values.to_numpy(zero_copy_only=True) if hasattr(values, "to_numpy") else values
    except (TypeError, ValueError) as error:
        # pyarrow tells of a copy, which integers without nulls never need.
        kind = str(getattr(values, "type", "unknown type"))
        hint = "convert it first"
        if "list" in kind.partition("<")[0]:
            hint = "if these are tokens, their numbers are pyarrow.compute.list_value_length of them"
        raise InvalidTypeError(
            f"{name} must be an array of integers, and is a pyarrow {type(values).__name__} of {kind}; {hint}"
        ) from error


def as_length_columns(lengths: Any, *, single: bool) -> list[IntegerArray]:
    """The lengths of one dataset, or of a list of datasets, as columns."""
    if single and not (isinstance(lengths, list | tuple) and len(lengths) == 1 and _is_column(lengths[0])):
        return [as_integer_column(lengths, "lengths")]
    # Neither a mapping nor a set has an order, and an array of no dimensions has no entries.
    ordered = hasattr(type(lengths), "__getitem__") and not isinstance(lengths, Mapping | str | bytes)
    if not ordered or getattr(lengths, "ndim", 1) == 0:
        raise InvalidTypeError(
            f"lengths must be a list with the lengths of each dataset, not of type {type(lengths).__name__}"
        )
    return [as_integer_column(column, f"lengths[{number}]") for number, column in enumerate(lengths)]


def _is_column(value: Any) -> bool:
    try:
        return np.ndim(value) == 1
    except (TypeError, ValueError):
        # Whatever it is, the reading of it will say what is wrong.
        return False


@dataclass(frozen=True, slots=True)
class _MappedColumn:
    """Where a memory-mapped column lies: what is pickled in its place."""

    path: str
    dtype: str
    offset: int
    count: int


def packed_lengths(lengths: list[IntegerArray] | None) -> list[Any] | None:
    """`lengths` to be pickled: of a column that is mapped whole from a file, only where it lies.

    A worker process then maps the same file instead of getting a copy.
    """
    if lengths is None:
        return None
    return [_packed(column) for column in lengths]


def _packed(column: Any) -> Any:
    # A view of a map keeps the map's offset, whatever part it shows; so only the map itself says where it lies.
    if _is_map(column) and column.filename is not None and column.mode == "r":
        return _MappedColumn(str(column.filename), column.dtype.str, column.offset, len(column))
    return np.asarray(column) if isinstance(column, np.memmap) else column


def unpacked_lengths(lengths: list[Any] | None) -> list[IntegerArray] | None:
    """The inverse of `packed_lengths`."""
    if lengths is None:
        return None
    return [_map_again(column) if isinstance(column, _MappedColumn) else column for column in lengths]


def _map_again(column: _MappedColumn) -> IntegerArray:
    try:
        return np.memmap(column.path, column.dtype, "r", column.offset, (column.count,))
    except FileNotFoundError as error:
        raise NotFoundError(
            error.errno, "is not there (any more), and a plan's lengths are mapped from it", column.path
        ) from error
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot be mapped for a plan's lengths: {error.strerror}", column.path
        ) from error
    except ValueError as error:
        raise _shortened(column.path, f"a plan's lengths are {column.count} entries of it") from error


def as_integer(value: Any, name: str, smallest: int, largest: int) -> int:
    """`value` as an int in `smallest` … `largest`; booleans are refused."""
    if isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be an integer, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(f"{name} must be an integer, not {value!r}") from None
    if not smallest <= number <= largest:
        raise InvalidInputError(f"{name} is {shown(number)}; it must be in {smallest} … {largest}")
    return number


def as_threads(threads: Any) -> int | None:
    """The argument `threads`: None, or 1 … `MOST_THREADS`."""
    return None if threads is None else as_integer(threads, "threads", 1, MOST_THREADS)


def as_path(path: Any, name: str) -> Path:
    """`path`, which must be one that a file or folder can have."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise InvalidTypeError(f"{name} must be a path, not {path!r}")
    try:
        named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        named = False
    if not named:
        raise InvalidInputError(
            f"{name} is {os.fspath(path)!r}; no path can hold a null character, or one that cannot be encoded"
        )
    return Path(path)


def as_absolute(path: Any, name: str) -> Path:
    """The absolute form of `path`, which must be one that a folder can have."""
    folder = as_path(path, name)
    try:
        return folder.absolute()
    except FileNotFoundError as error:
        raise NotFoundError(
            error.errno, f"{name} is relative, and the current folder was removed", str(folder)
        ) from error


def as_new_folder(path: Any, name: str) -> Path:
    """The absolute path of a folder to be made, which cannot be the current one."""
    folder = as_absolute(path, name)
    # A current folder that was removed is no folder to be made either.
    with contextlib.suppress(FileNotFoundError):
        if Path(os.path.normpath(folder)) == Path.cwd():
            raise InvalidInputError(f"{name} is {str(path)!r}, the current folder; name a folder to be made")
    return folder
