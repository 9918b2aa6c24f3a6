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
    # Of these shards, those that somebody had kept: it is not with their step that what was fetched of them ends.
    were_kept: set[str]


class Ending(NamedTuple):
    """What is to be done at the end of a step; of errands, those for consumers come before those for owners."""

    # By owner, what the step claimed and did not keep.
    drained: dict[str, list[str]]
    # Names of what some workers keep and others do not.
    half_kept: set[str]
    # Steps that end in this process.
    here: list[int]
    # For workers that began it under a number that others had.
    contested: list[Errand]
    consumers: list[Errand]
    owners: list[Errand]
    # For all, by their names: what no step drains, since somebody kept it.
    drops: list[Errand]
    # For owners that have shards of it still.
    removals: list[Errand]
