"""Checks the arguments that the packing functions share, and converts arrays.

Invariants: no value of an array is rounded or wrapped. If an array lies in a mapped file, the file holds all of it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    StorageError,
    format_integer,
    format_type,
)

IntegerArray = NDArray[np.integer[Any]]
_BOOLEANS = frozenset({bool, np.bool_})
_NEEDED = "give an array or a sequence of integers, one a sample"


def as_integer_array(values: Any, name: str) -> IntegerArray:
    """Return `values` as a one-dimensional numpy array of integers.

    Args:
        values: A numpy array (strided or memory-mapped), a torch tensor, a pyarrow array, a column of a HF
            `Dataset`, or a sequence of Python integers. Columns, sequences, tensors on a device, pyarrow arrays of
            several chunks and arrays of foreign byte order are copied.
        name: The name of the argument, for messages.

    Returns:
        Shape (n,), of a native integer dtype.

    Raises:
        InvalidTypeError: The values are floats, booleans, objects or nulls: anything but integers.
        InvalidInputError: They have another number of dimensions than one.
        StorageError: The array is mapped from a file that was truncated since.

    Example:
        >>> as_integer_array([3, 5], "lengths")
        array([3, 5])
    """
    if type(values) is np.ndarray and values.base is None and values.ndim == 1 and values.dtype.kind in "iu":
        # An array that owns its memory is in no mapped file.
        return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
    package = type(values).__module__.partition(".")[0]
    if package == "datasets" and type(values).__name__ == "Column":
        # `dataset["length"]`: reading each entry is a query of its own, reading all of them is one.
        values = values[:]
        package = type(values).__module__.partition(".")[0]
    if isinstance(values, str | os.PathLike):
        hint = _lengths_hint(name, repr(os.fspath(values)))
        raise InvalidTypeError(f"{name} is {format_type(values)}: {_NEEDED}{hint}")
    if package == "datasets":
        # numpy would read all samples.
        raise InvalidTypeError(
            f"{name} is {format_type(values)}, which holds samples: {_NEEDED}{_lengths_hint(name, 'dataset')}"
        )
    if package == "torch":
        values = _from_torch(values, name)
    elif package == "pyarrow":
        values = _from_arrow(values, name)
    elif isinstance(values, np.ma.MaskedArray):
        raise InvalidTypeError(f"{name} is a masked array: fill or drop the masked entries first")
    elif isinstance(values, bytes | bytearray):
        raise InvalidTypeError(
            f"{name} is {format_type(values)}, whose bytes are no numbers of tokens: {_NEEDED}"
        )
    try:
        # A memory map stays one, and so does an array of `node_shared`, to be pickled as what they are.
        array: IntegerArray = np.asanyarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        _check_entries(values, name)
        raise InvalidTypeError(f"{name} cannot be read as an array of integers: {error}") from error
    if array.ndim == 0 and array.dtype.kind not in "biufc":
        # numpy takes a mapping, a set, a generator, a text or None for one object.
        raise InvalidTypeError(f"{name} is {format_type(values)}: {_NEEDED}")
    if array.ndim != 1:
        hint = _lengths_hint(name, "samples") if array.ndim else ""
        raise InvalidInputError(f"{name} has the shape {array.shape}: give one dimension{hint}")
    if array.dtype.kind not in "iu":
        if array.size == 0 and array.dtype.kind == "f":
            # numpy makes floats of an empty list.
            return np.empty(0, dtype=np.int64)
        _check_entries(values, name)
        raise InvalidTypeError(f"{name} has the dtype {array.dtype}: convert it to integers first")
    if isinstance(values, list | tuple) and not _BOOLEANS.isdisjoint(map(type, values)):
        # Among integers, numpy converts booleans to integers.
        _check_entries(values, name)
    _check_file_of(array, name)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _lengths_hint(name: str, source: str) -> str:
    return f"; td.packing.lengths({source}) reads them" if name.startswith("lengths") else ""


def _check_entries(values: Any, name: str) -> None:
    """Refuse the first entry of a sequence that is not an integer, if there is one."""
    if isinstance(values, np.ndarray) or not hasattr(values, "__len__"):
        return
    for position, value in enumerate(values):
        if type(value) in _BOOLEANS or not isinstance(value, int | np.integer):
            is_sample = hasattr(value, "__len__") and not isinstance(value, str)
            hint = _lengths_hint(name, "samples") if is_sample else ""
            raise InvalidTypeError(f"{name}[{position}] is {format_type(value)}: give one integer{hint}")
        if not -(2**63) <= value < 2**63:
            raise InvalidInputError(
                f"{name}[{position}] is {format_integer(int(value))}, beyond what int64 holds"
            )


def _check_file_of(array: IntegerArray, name: str) -> None:
    """Refuse an array whose file was truncated after it was mapped: reading it would end the process (SIGBUS)."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and not is_memory_map(owner):
        owner = owner.base
    if not is_memory_map(owner) or not len(array):
        return
    try:
        # The open file: another file may have its name by now.
        size = owner.base.size()
    except (OSError, ValueError):
        return
    behind = max(array.strides[0], 0) * (len(array) - 1) + array.itemsize
    needed = owner.offset + array.ctypes.data - owner.ctypes.data + behind
    if size < needed:
        raise truncated_file(owner.filename, f"{name} needs {needed} bytes of it, and it has {size}")


def is_memory_map(array: Any) -> bool:
    """Whether an array is a whole memory map of numpy, and no view of one."""
    # A view of a map is of the same class, and has the map, or another view, as its base.
    return isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap)


def truncated_file(path: Any, reason: str) -> StorageError:
    """The error for an array whose file was truncated after it was mapped."""
    where = "a file that has no name any more" if path is None else str(path)
    return StorageError(errno.EIO, f"was truncated after it was mapped: {reason}; write it again", where)


class _MappedArray:
    """Placeholder in a pickle for an array that is mapped whole from a file; loading maps the file again."""

    def __init__(self, array: Any) -> None:
        self._place = (str(array.filename), array.dtype.str, array.offset, len(array))

    def __reduce__(self) -> tuple[Callable[..., IntegerArray], tuple[str, str, int, int]]:
        return _map_again, self._place


def as_picklable(array: Any) -> Any:
    """The array, or what stands for it in a pickle. A worker process then maps the file instead of getting a copy."""
    # A view of a map keeps the map's offset, whatever part it shows. Only the map itself says where it lies.
    if is_memory_map(array) and array.filename is not None and array.mode == "r":
        return _MappedArray(array)
    return np.asarray(array) if isinstance(array, np.memmap) else array


def _map_again(path: str, dtype: str, offset: int, count: int) -> IntegerArray:
    try:
        return np.memmap(path, dtype, "r", offset, (count,))
    except FileNotFoundError as error:
        raise NotFoundError(
            error.errno, "is not there (any more), and a plan's lengths are mapped from it", path
        ) from error
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot be mapped for a plan's lengths: {error.strerror}", path
        ) from error
    except ValueError as error:
        raise truncated_file(path, f"a plan's lengths are {count} entries of it") from error


def _from_torch(values: Any, name: str) -> Any:
    try:
        return values.detach().cpu().numpy()
    except (AttributeError, RuntimeError, TypeError) as error:
        raise InvalidTypeError(f"{name} is a torch object that numpy cannot read: {error}") from error


def _from_arrow(values: Any, name: str) -> Any:
    if getattr(values, "null_count", 0):
        raise InvalidTypeError(f"{name} has {values.null_count} nulls: give an entry for every sample")
    if hasattr(values, "num_chunks"):
        values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
    if hasattr(values, "num_chunks"):
        # Older pyarrow gives a chunked array back.
        values = values.chunk(0) if values.num_chunks else np.empty(0, dtype=np.int64)
    try:
        return values.to_numpy(zero_copy_only=True) if hasattr(values, "to_numpy") else values
    except (TypeError, ValueError) as error:
        # pyarrow refuses because a copy would be needed, which integers without nulls never need.
        kind = str(getattr(values, "type", "unknown type"))
        hint = "convert it to integers first"
        if "list" in kind.partition("<")[0]:
            hint = "if these are tokens, give pyarrow.compute.list_value_length of them"
        raise InvalidTypeError(f"{name} is {format_type(values)} of {kind}: {hint}") from error


def as_length_arrays(lengths: Any, *, single: bool, name: str = "lengths") -> list[IntegerArray]:
    """The lengths, or what `name` says, of one dataset or of a list of datasets, as arrays."""
    if single and not (
        isinstance(lengths, list | tuple) and len(lengths) == 1 and _is_one_dimensional(lengths[0])
    ):
        return [as_integer_array(lengths, name)]
    # Mappings and sets have no order, and an array without dimensions has no entries.
    ordered = hasattr(type(lengths), "__getitem__") and not isinstance(lengths, Mapping | str | bytes)
    if not ordered or getattr(lengths, "ndim", 1) == 0:
        raise InvalidTypeError(
            f"{name} is {format_type(lengths)}: give a list with the {name} of each dataset"
        )
    first: Any = next(iter(lengths), [])
    if isinstance(first, int) or getattr(first, "ndim", 1) == 0:
        raise InvalidInputError(
            f"{name}[0] is a number: give a list with the {name} of each dataset, [{name}] for one dataset"
        )
    return [as_integer_array(column, f"{name}[{number}]") for number, column in enumerate(lengths)]


def _is_one_dimensional(value: Any) -> bool:
    try:
        return np.ndim(value) == 1
    except (TypeError, ValueError):
        # `as_integer_array` says what is wrong with it.
        return False


def as_integer(value: Any, name: str, smallest: int, largest: int) -> int:
    """`value` as an int in `smallest` … `largest`; booleans are refused."""
    if isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be an integer, not {value!r:.100}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(f"{name} must be an integer, not {value!r:.100}") from None
    if not smallest <= number <= largest:
        raise InvalidInputError(f"{name} is {format_integer(number)}; it must be in {smallest} … {largest}")
    return number


def as_optional_integer(value: Any, name: str, smallest: int, largest: int) -> int | None:
    """`value` as `as_integer` gives it; None stays None."""
    return None if value is None else as_integer(value, name, smallest, largest)


def check_flag(value: Any, name: str) -> None:
    """Refuse a `value` that is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, not {value!r:.100}")


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    """Refuse a `value` that is none of the words in `choices`."""
    listed = ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise InvalidTypeError(f"{name} must be one of {listed}, not {value!r:.100}")
    if value not in choices:
        raise InvalidInputError(f"{name} is {value!r:.100}; it must be one of {listed}")


def check_sharing(share: Any, group: Any) -> None:
    """Refuse a `share` that is neither True nor False, and a `group` without it."""
    check_flag(share, "share")
    if group is not None and not share:
        raise InvalidInputError("group is given, and share is False: give share=True, or leave group out")


def as_path(path: Any, name: str) -> Path:
    """`path`, which must be one that a file or folder can have."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise InvalidTypeError(f"{name} is {path!r}: give a path, as a non-empty str or a pathlib.Path")
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


def make_folder(folder: Path, name: str) -> None:
    """Make a folder, and those above it, unless it is there; `name` is the argument that asks for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise AlreadyExistsError(
            error.errno, f"is not a folder, so it cannot be the {name}", str(folder)
        ) from error
    except OSError as error:
        raise StorageError(error.errno, f"cannot make the {name}: {error.strerror}", str(folder)) from error
