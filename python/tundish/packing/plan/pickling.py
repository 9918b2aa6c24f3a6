"""Pickles plans and the lengths that are attached to them, without the contents of mapped files and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tundish.errors import NotFoundError, PlanMismatchError, StorageError
from tundish.packing.arguments.integer_arrays import IntegerArray, is_memory_map, truncated_file
from tundish.packing.plan.shared_block import columns_in

__all__ = ["pickled_lengths", "plan_in_block", "plan_in_folder", "plan_of_columns"]


Plan = TypeVar("Plan")


def plan_in_folder(plan_class: Any, path: Path, fingerprint: str, lengths: list[Any] | None) -> Any:
    """Map the plan that was pickled as its folder.

    Args:
        plan_class: `PackPlan`, whose module imports this one.
        path: The folder.
        fingerprint: The plan's.
        lengths: A result of `pickled_lengths`.

    Raises:
        PlanMismatchError: The folder holds another plan.
    """
    plan = plan_class.load(path, _unpickled(lengths), progress=False)
    if plan.fingerprint != fingerprint:
        raise PlanMismatchError(f"{path} holds another plan now than the one that was pickled")
    return plan


def plan_in_block(
    plan_class: Callable[..., Plan], block: NDArray[np.uint8], lengths: list[Any] | None
) -> Plan:
    """Make the plan that lies in a block of shared memory; `lengths` may be pickled ones."""
    metadata, columns = columns_in(block)
    return plan_class(columns, metadata, lengths=_unpickled(lengths), block=block)


def plan_of_columns(
    plan_class: Callable[..., Plan], columns: Sequence[NDArray[Any]], metadata: str, lengths: list[Any] | None
) -> Plan:
    """Make the plan that was pickled with its columns; `lengths` are a result of `pickled_lengths`."""
    return plan_class(columns, metadata, lengths=_unpickled(lengths))


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


def _unpickled(lengths: list[Any] | None) -> list[IntegerArray] | None:
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
