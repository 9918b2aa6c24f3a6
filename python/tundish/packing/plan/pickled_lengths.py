"""Pickles the lengths that are attached to a plan, without the contents of mapped files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tundish.errors import NotFoundError, StorageError
from tundish.packing.arguments.integer_arrays import IntegerArray, is_memory_map, truncated_file

__all__ = ["pickled_lengths", "unpickled_lengths"]


@dataclass(frozen=True, slots=True)
class _MappedFile:
    """Where a memory-mapped array lies in its file; pickled in its place."""

    path: str
    dtype: str
    offset: int
    count: int


def pickled_lengths(lengths: list[IntegerArray] | None) -> list[Any] | None:
    """The lengths as they are pickled: an array that is mapped whole from a file is pickled as its file and offset.

    A worker process then maps the same file instead of getting a copy.
    """
    if lengths is None:
        return None
    return [_as_picklable(column) for column in lengths]


def _as_picklable(column: Any) -> Any:
    # A view of a map keeps the map's offset, whatever part it shows. Only the map itself says where it lies.
    if is_memory_map(column) and column.filename is not None and column.mode == "r":
        return _MappedFile(str(column.filename), column.dtype.str, column.offset, len(column))
    return np.asarray(column) if isinstance(column, np.memmap) else column


def unpickled_lengths(lengths: list[Any] | None) -> list[IntegerArray] | None:
    """Restore lengths from `pickled_lengths`."""
    if lengths is None:
        return None
    return [_map_again(column) if isinstance(column, _MappedFile) else column for column in lengths]


def _map_again(column: _MappedFile) -> IntegerArray:
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
        raise truncated_file(column.path, f"a plan's lengths are {column.count} entries of it") from error
