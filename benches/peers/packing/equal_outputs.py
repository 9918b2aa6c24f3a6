"""Compares the outputs of packing: in full, and in each round by their sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from measure import OutputsDiffer

from packing import numpy_forms


def assert_equal(what: str, ours: Any, theirs: Any) -> None:
    """Raises OutputsDiffer if two arrays differ."""
    if not np.array_equal(ours, theirs):
        raise OutputsDiffer(f"{what}: tundish and its peer disagree")


def assert_all_equal(case: str, ours: numpy_forms.Arrays, theirs: numpy_forms.Arrays) -> None:
    """Raises OutputsDiffer if one of the six arrays of two plans differs."""
    for field in numpy_forms.FIELDS:
        assert_equal(f"{case}, {field}", ours[field], theirs[field])


def sums(arrays: numpy_forms.Arrays) -> tuple[int, ...]:
    """The digest of a plan's arrays."""
    return tuple(int(arrays[field].sum(dtype=np.int64)) for field in numpy_forms.FIELDS)
