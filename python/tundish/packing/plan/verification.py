"""Verifies a plan against the lengths and the order that it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from tundish import _native
from tundish.errors import PlanMismatchError
from tundish.packing.arguments.integer_arrays import IntegerArray, as_cost_arrays, as_integer_array
from tundish.packing.arguments.integers import as_threads
from tundish.progress import ProgressLine

__all__ = ["verify_plan"]


def verify_plan(
    columns: Sequence[NDArray[Any]],
    metadata: str,
    lengths: Sequence[IntegerArray],
    *,
    order: Any,
    costs: Any,
    threads: Any,
    progress: bool | None,
) -> None:
    """Check a plan as `PackPlan.verify` documents.

    Raises:
        PlanMismatchError: The plan does not belong to the lengths and the order; the message says what to do.
    """
    given = None if order is None else as_integer_array(order, "order")
    costed = None if costs is None else as_cost_arrays(costs, single=len(lengths) == 1)
    try:
        with ProgressLine("plan", progress) as line:
            _native.verify_plan(columns, metadata, lengths, given, costed, as_threads(threads), line.callback)
    except PlanMismatchError as error:
        if "an order was given" in str(error) or "costs were given" in str(error):
            raise
        raise PlanMismatchError(
            f"{error}; either these are not the lengths and the order that the plan was made from, or the plan is "
            "damaged: pass those of the plan, or make it anew"
        ) from None
