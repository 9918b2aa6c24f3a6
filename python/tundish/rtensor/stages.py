"""What a controller notes of a step as it begins and as it ends.

What always holds: what the end of a step comes to is noted before any of it is done.
"""

from __future__ import annotations

from typing import NamedTuple

from tundish.rtensor.errands import Errand
from tundish.rtensor.handle import RTensor

__all__ = ["Begun", "Ending"]


class Begun(NamedTuple):
    """A step that has begun."""

    number: int
    handles: list[RTensor]
    # By owner, the shards that are claimed, and the line on which they are.
    owners: dict[str, list[str]]
    lines: dict[str, int | None]


class Ending(NamedTuple):
    """What is to be done at the end of a step."""

    # By owner, what the step claimed and did not keep.
    drained: dict[str, list[str]]
    here: list[int]
    contested: list[Errand]
    consumers: list[Errand]
    owners: list[Errand]
    # For owners that have given up their claims.
    removals: list[Errand]
    # For all, of what some were told to keep, and not every one.
    half_kept: list[Errand]
    # For all, of what was carried over before, and ends now.
    carried: list[Errand]
