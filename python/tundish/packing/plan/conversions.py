"""Converts a plan to int64 arrays, and to Megatron-LM's `sample_index`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import InvalidInputError, OutOfMemoryError
from tundish.packing.arguments.integer_arrays import IntegerArray, as_integer_array
from tundish.progress import ProgressLine

__all__ = ["as_int64", "sample_index"]


def as_int64(fields: Sequence[str], columns: Sequence[NDArray[Any]]) -> dict[str, NDArray[np.int64]]:
    """Copy the columns as `PackPlan.arrays` documents.

    Raises:
        OutOfMemoryError: There is no room for them.
    """
    try:
        return {name: column.astype(np.int64) for name, column in zip(fields, columns, strict=True)}
    except MemoryError as error:
        needed = 8 * sum(map(len, columns))
        raise OutOfMemoryError(
            f"the columns as int64 need {needed} bytes of memory, which the system does not have; use the plan's "
            f"attributes ({', '.join(fields)}), which are the columns without a copy"
        ) from error


def sample_index(
    columns: Sequence[NDArray[Any]],
    metadata: str,
    lengths: Sequence[IntegerArray] | None,
    *,
    mode: str,
    order: Any,
    progress: bool | None,
) -> IntegerArray:
    """Convert a plan as `PackPlan.sample_index` documents.

    Raises:
        InvalidInputError: The plan is not of mode "hard".
    """
    if mode != "hard":
        raise InvalidInputError(
            f"this plan is of mode {mode!r}, and Megatron's sample_index can only say where one stream of "
            "tokens is cut. Read the packs with plan.lookup, or pack with mode='hard'"
        )
    given = None if order is None else as_integer_array(order, "order")
    with ProgressLine("plan", progress) as line:
        return _native.plan_sample_index(columns, metadata, lengths, given, line.callback)
