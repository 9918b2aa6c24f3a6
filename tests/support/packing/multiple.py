"""Which packs `multiple_of` leaves out or repeats, by its definition; imports nothing from tundish."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Selected", "select"]


class Selected(NamedTuple):
    """The packs that are kept, left out and repeated."""

    kept: list[Any]
    left_out: list[Any]
    repeated: list[Any]


def select(packs: list[Any], of: int, remainder: str | None) -> Selected:
    """Select of `packs`, each with a `dataset_id`, those of the first dataset first."""
    if remainder == "repeat":
        return Selected(packs, [], [packs[number % len(packs)] for number in range(-len(packs) % of)])
    ids = [pack.dataset_id for pack in packs]
    lacking, left_out = len(packs) % of, set()
    for dataset in sorted(set(ids), key=lambda dataset: (-ids.count(dataset), dataset)):
        # The last ones, and never all of a dataset.
        own = [number for number, owner in enumerate(ids) if owner == dataset][1:]
        chosen = own[len(own) - min(lacking, len(own)) :]
        left_out.update(chosen)
        lacking -= len(chosen)
    kept = [pack for number, pack in enumerate(packs) if number not in left_out]
    return Selected(kept, [packs[number] for number in sorted(left_out)], [])
