"""The length of the long tests: some points in every run, all of them under `make soak`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

IS_SOAK = os.environ.get("TUNDISH_SOAK", "0") != "0"
_POINTS = 10


def chosen(points: Sequence[T]) -> Sequence[T]:
    """Ten of `points`, evenly from the first to the last; all of them under `make soak`."""
    if IS_SOAK or len(points) <= _POINTS:
        return points
    return [points[number * (len(points) - 1) // (_POINTS - 1)] for number in range(_POINTS)]


def covering(first: Collection[T], second: Collection[U]) -> list[tuple[T, U]]:
    """Pairs in which each of `first` and each of `second` stands; all pairs under `make soak`."""
    if IS_SOAK:
        return list(itertools.product(first, second))
    pairs = zip(itertools.cycle(first), itertools.cycle(second), strict=False)
    return list(itertools.islice(pairs, max(len(first), len(second))))
