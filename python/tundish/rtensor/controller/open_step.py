"""`OpenStep`: what a controller knows about its current step."""

from __future__ import annotations

from typing import NamedTuple

from tundish.rtensor.handles import RTensor

__all__ = ["OpenStep"]


class OpenStep(NamedTuple):
    """A step that has begun.

    Attributes:
        number: its number.
        handles: the handles that it claims.
        owners: the ids of their shards, by owner.
        kept: shards that `keep` carries over, by owner and id.
        kept_by_some: ids that some workers keep though they may end with the step.
        connections: the number of the connection to each worker.
    """

    number: int
    handles: list[RTensor]
    owners: dict[str, list[str]]
    kept: set[tuple[str, str]]
    kept_by_some: set[str]
    connections: dict[str, int | None]
