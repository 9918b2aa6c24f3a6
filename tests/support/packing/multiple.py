"""Which packs `multiple_of` leaves out or repeats, by its definition; imports nothing from tundish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Selected", "select"]


class Selected(NamedTuple):
    """The packs that are kept, left out and repeated."""

    kept: list[Any]
    left_out: list[Any]
    repeated: list[Any]


def select(packs: list[Any], of: int, remainder: str | None, taken: Callable[[Any], int]) -> Selected:
    """Select of `packs`, each with a `dataset_id`; `taken` says how many of its tokens are taken."""
    if remainder == "repeat":
        return Selected(packs, [], [packs[number % len(packs)] for number in range(-len(packs) % of)])
    ids = [pack.dataset_id for pack in packs]

    def goes_first(number: int) -> tuple[int, int, int, int]:
        return taken(packs[number]), -ids.count(ids[number]), -ids[number], -number

    left_out = set(sorted(range(len(packs)), key=goes_first)[: len(packs) % of])
    kept = [pack for number, pack in enumerate(packs) if number not in left_out]
    return Selected(kept, [packs[number] for number in sorted(left_out)], [])
