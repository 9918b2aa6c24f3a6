"""The length of the long tests: some points in every run, all of them under `make soak`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

IS_SOAK = os.environ.get("TUNDISH_SOAK", "0") != "0"
_POINTS = 10


def chosen(points: Sequence[T]) -> Sequence[T]:
    """Ten of `points`, evenly from the first to the last; all of them under `make soak`."""
    if IS_SOAK or len(points) <= _POINTS:
        return points
    return [points[number * (len(points) - 1) // (_POINTS - 1)] for number in range(_POINTS)]
