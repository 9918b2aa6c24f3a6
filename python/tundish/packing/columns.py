"""Arguments as one-dimensional integer arrays, without a copy wherever the memory already is one.

Owns the conversion of lengths and orders from what users hold (numpy, torch, pyarrow, plain sequences) to
numpy. What always holds: the result is one-dimensional, of a native integer dtype, and nothing was rounded,
wrapped or turned into a Python list on the way.
"""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, shown

# Pools are kept for the life of the process, so a slip of the pen must not start thousands of threads.
MOST_THREADS = 512

IntegerArray = NDArray[np.integer[Any]]


def as_integer_column(values: Any, name: str) -> IntegerArray:
    """`values` as a 1-D numpy array of integers, shape (n,).

    Args:
        values: a numpy array (strided or memory-mapped), a torch tensor, a pyarrow array, or a
            sequence of Python integers. Only a chunked pyarrow array of several chunks, a tensor on a
            device, a sequence and an array of foreign byte order are copied.
        name: what the argument is called, for messages.

    Raises:
        InvalidTypeError: floats, booleans, objects, nulls: anything that is no integer.
        InvalidInputError: another number of dimensions than one.
    """
    package = type(values).__module__.partition(".")[0]
    if package == "torch":
        values = _from_torch(values, name)
    elif package == "pyarrow":
        values = _from_arrow(values, name)
    elif isinstance(values, np.ma.MaskedArray):
        raise InvalidTypeError(f"{name} is a masked array; fill or drop the masked entries first")
    try:
        # A memory map stays one, so that it can be pickled as what it is.
        array = values if type(values) is np.memmap else np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidTypeError(f"{name} cannot be read as an array of integers: {error}") from error
    if array.ndim != 1:
        raise InvalidInputError(
            f"{name} must have one dimension, one entry a sample; it is a "
            f"{type(values).__name__} of shape {array.shape}"
        )
    if array.dtype.kind not in "iu":
        if array.size == 0 and array.dtype.kind == "f":
            # What numpy makes of an empty list.
            return np.empty(0, dtype=np.int64)
        raise InvalidTypeError(f"{name} must be integers, and its dtype is {array.dtype}; convert it first")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


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
        raise InvalidTypeError(f"{name} is a pyarrow object that is no array of integers: {error}") from error


def as_length_columns(lengths: Any, *, single: bool) -> list[IntegerArray]:
    """The lengths of one dataset, or of a list of datasets, as columns."""
    if single and not (isinstance(lengths, list | tuple) and len(lengths) == 1 and np.ndim(lengths[0]) == 1):
        return [as_integer_column(lengths, "lengths")]
    return [as_integer_column(column, f"lengths[{number}]") for number, column in enumerate(lengths)]


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
    return [
        _MappedColumn(str(column.filename), column.dtype.str, column.offset, len(column))
        if isinstance(column, np.memmap) and _is_whole(column)
        else np.asarray(column)
        for column in lengths
    ]


def _is_whole(column: np.memmap[Any, Any]) -> bool:
    # A view of a map keeps the map's offset, whatever part it shows; only the map itself has an `mmap` as its base.
    return column.filename is not None and column.mode == "r" and not isinstance(column.base, np.ndarray)


def unpacked_lengths(lengths: list[Any] | None) -> list[IntegerArray] | None:
    """The inverse of `packed_lengths`."""
    if lengths is None:
        return None
    return [
        np.memmap(column.path, column.dtype, "r", column.offset, (column.count,))
        if isinstance(column, _MappedColumn)
        else column
        for column in lengths
    ]


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


def as_new_folder(path: Any, name: str) -> Path:
    """The absolute path of a folder to be made, which cannot be the current one."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise InvalidTypeError(f"{name} must be the path of a folder, not {path!r}")
    folder = Path(path).absolute()
    if Path(os.path.normpath(folder)) == Path.cwd():
        raise InvalidInputError(
            f"{name} is {os.fspath(path)!r}, the current folder; name a folder to be made"
        )
    return folder
