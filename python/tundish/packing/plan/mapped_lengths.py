"""Pickles lengths that are mapped from a file as the file's path, without the contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tundish.errors import NotFoundError, StorageError
from tundish.packing.arguments.integer_arrays import IntegerArray, is_memory_map, truncated_file

__all__ = ["as_picklable"]


class _MappedArray:
    """Stands in a pickle for an array that is mapped whole from a file; unpickling maps the file again."""

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
