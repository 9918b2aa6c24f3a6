"""Checks the arguments of `mix` and `PackMix`; the compiled module checks the values of weights."""

from __future__ import annotations

import numbers
from typing import Any

from tundish.errors import InvalidInputError, InvalidTypeError, format_count, format_type
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["as_plans", "as_weights"]


def as_plans(plans: Any) -> list[PackPlan]:
    """The plans that are given, themselves or as datasets that have them.

    Raises:
        InvalidTypeError: They are no list, or one is neither a plan nor a `PackedDataset` of a plan.
        InvalidInputError: There are none.
    """
    if not isinstance(plans, list | tuple):
        raise InvalidTypeError(f"plans is {format_type(plans)}: give a list of plans, or of PackedDatasets")
    if not plans:
        raise InvalidInputError("plans is empty: give at least one plan")
    found = []
    for number, given in enumerate(plans):
        plan = given if isinstance(given, PackPlan) else getattr(given, "plan", None)
        if not isinstance(plan, PackPlan):
            raise InvalidTypeError(
                f"plans[{number}] is {format_type(given)}: give a PackPlan, as pack returns it, or the "
                "PackedDataset of one"
            )
        found.append(plan)
    return found


def as_weights(weights: Any, plans: int) -> tuple[float, ...]:
    """`weights` as one float for each plan; the compiled module checks their values.

    Raises:
        InvalidTypeError: The weights are no sequence of numbers.
        InvalidInputError: There are not as many weights as plans, or one is beyond every float.
    """
    given = weights.tolist() if hasattr(weights, "tolist") else weights
    if not isinstance(given, list | tuple):
        raise InvalidTypeError(
            f"weights is {format_type(weights)}: give a list of numbers, one for each plan"
        )
    if len(given) != plans:
        raise InvalidInputError(
            f"{format_count(len(given), 'weight')} for {format_count(plans, 'plan')}: give one for each plan"
        )
    found = []
    for number, weight in enumerate(given):
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise InvalidTypeError(f"weights[{number}] is {weight!r:.100}: a weight is a number")
        try:
            found.append(float(weight))
        except OverflowError:
            raise InvalidInputError(
                f"weights[{number}] is larger than any float: give a smaller one"
            ) from None
    return tuple(found)
