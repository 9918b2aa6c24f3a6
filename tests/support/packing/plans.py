"""Changed copies of plans, and checks that tests of several modes share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tundish as td
from tundish.errors import PlanMismatchError

__all__ = ["assert_changed_entries_are_found", "assert_written_alike", "changed", "columns_of", "inode_of"]


def columns_of(plan: td.PackPlan) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in plan.arrays().items()}


def changed(plan: td.PackPlan, columns: Sequence[np.ndarray] | None = None, **facts: Any) -> td.PackPlan:
    """The plan as a load from disk without `lengths=` gives it, but for these columns and facts of `plan.json`."""
    copies = [column.copy() for column in columns or [getattr(plan, name) for name in plan.arrays()]]
    counts = {**plan.metadata["counts"], **facts.pop("counts", {})}
    return td.PackPlan(copies, json.dumps({**plan.metadata, **facts, "counts": counts}))


def assert_changed_entries_are_found(plan: td.PackPlan, lengths: Any, **given: Any) -> None:
    """`verify` finds each offset that is one more than it should be, and each sample that takes another's place."""
    changed(plan).verify(lengths, **given)
    columns = {field: getattr(plan, field).copy() for field in plan.arrays()}
    taken = columns["indices"]
    for position in range(len(taken)):
        taken[position], kept = taken[position - 1], taken[position]
        if taken[position] != kept:
            with pytest.raises(PlanMismatchError):
                changed(plan, list(columns.values())).verify(lengths, **given)
        taken[position] = kept
    for name in columns.keys() - {"indices"}:
        for position in range(len(getattr(plan, name))):
            columns = {field: getattr(plan, field).copy() for field in plan.arrays()}
            columns[name][position] += 1
            with pytest.raises(PlanMismatchError):
                changed(plan, list(columns.values())).verify(lengths, **given)


def assert_written_alike(plan: td.PackPlan, folder: Path, lengths: Any, **options: Any) -> td.PackPlan:
    """A saved plan has the files that `pack` writes with `out`; it is loaded and cached. Returns it as loaded."""
    pack: Any = td.pack_datasets if len(plan.num_samples) > 1 else td.pack
    plan.save(folder / "saved")
    written = pack(lengths, plan.max_length, **options, out=folder / "written")
    assert written.metadata == plan.metadata and written.fingerprint == plan.fingerprint
    for file in (folder / "saved").iterdir():
        assert file.read_bytes() == (folder / "written" / file.name).read_bytes(), file.name
    cached = pack(lengths, plan.max_length, **options, cache_dir=folder / "cache")
    assert cached.path is not None and cached.path.name == f"plan-{plan.fingerprint}"
    loaded = td.PackPlan.load(folder / "saved", lengths)
    loaded.verify()
    assert list(loaded) == list(plan)
    return loaded


def inode_of(array: np.ndarray) -> str:
    """Of the file or the memory that the array is mapped from."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        start, stop = (int(end, 16) for end in span.split("-"))
        if start <= address < stop:
            return inode
    raise AssertionError("nothing is mapped there")
