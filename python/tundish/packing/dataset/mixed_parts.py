"""The datasets of a mix: one `PackedDataset` for each of its plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from tundish.errors import InvalidInputError, InvalidTypeError, PlanMismatchError, format_count, format_type
from tundish.packing.mixing.pack_mix import PackMix
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["items_of_mix", "parts_of_mix"]


class PartOfMix(Protocol):
    """What a mix needs of a `PackedDataset`."""

    @property
    def plan(self) -> Any: ...
    @property
    def columns(self) -> Any: ...
    @property
    def sample_columns(self) -> Any: ...

    def __getitems__(self, indices: Sequence[int], /) -> list[dict[str, Any]]: ...


Part = TypeVar("Part", bound=PartOfMix)


def parts_of_mix(
    datasets: Any,
    mix: PackMix,
    part_class: type[Part],
    make: Callable[[Any, PackPlan], Part],
    *,
    has_options: bool,
) -> list[Part]:
    """The `PackedDataset` of each plan of a mix.

    Args:
        datasets: What each plan was made for, or a `PackedDataset` of each plan.
        mix: The mix.
        part_class: `PackedDataset`, whose module imports this one.
        make: Makes a `PackedDataset` of a dataset and a plan.
        has_options: Whether options were given for `make`, which a `PackedDataset` cannot follow.
    """
    plans = mix.plans
    if not isinstance(datasets, list | tuple):
        raise InvalidTypeError(
            f"datasets is {format_type(datasets)}: give a list, for a mix, of what each of its plans was made for"
        )
    if len(datasets) != len(plans):
        raise PlanMismatchError(
            f"the mix has {format_count(len(plans), 'plan')}, and {len(datasets)} datasets are given: give a list of "
            "what each plan was made for, in the order of the mix"
        )
    parts = []
    for number, (given, plan) in enumerate(zip(datasets, plans, strict=True)):
        if not isinstance(given, part_class):
            parts.append(make(given, plan))
            continue
        if has_options:
            raise InvalidInputError(
                f"datasets[{number}] is a PackedDataset, which has options of its own: give the options where it is "
                "made"
            )
        if getattr(given.plan, "fingerprint", None) != plan.fingerprint:
            raise PlanMismatchError(
                f"datasets[{number}] is of another plan than plan {number} of the mix: give the PackedDatasets in the "
                "order of the mix, or mix their plans"
            )
        parts.append(given)
    for number, part in enumerate(parts):
        if (part.columns, part.sample_columns) != (parts[0].columns, parts[0].sample_columns):
            raise InvalidInputError(
                f"datasets[{number}] has other columns or sample_columns than datasets[0]: a batch has packs of both, "
                "so give both the same"
            )
    return parts


def items_of_mix(parts: Sequence[PartOfMix], mix: PackMix, places: list[int]) -> list[dict[str, Any]]:
    """The items in these places of a mix; each part is asked once for all of its packs."""
    plans, packs = (numbers.tolist() for numbers in mix.lookup(places))
    items: list[dict[str, Any]] = [{}] * len(places)
    for plan in sorted(set(plans)):
        rows = [row for row, of in enumerate(plans) if of == plan]
        found = parts[plan].__getitems__([packs[row] for row in rows])
        for row, item in zip(rows, found, strict=True):
            items[row] = item
    return items
