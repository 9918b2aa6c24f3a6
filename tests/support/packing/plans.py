"""Changed copies of plans, and checks that tests of several modes share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tundish as td


def columns_of(plan: td.PackPlan) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in plan.arrays().items()}


def changed(plan: td.PackPlan, columns: Sequence[np.ndarray] | None = None, **facts: Any) -> td.PackPlan:
    """The plan as a load from disk without `lengths=` gives it, but for these columns and facts of `plan.json`."""
    copies = [column.copy() for column in columns or [getattr(plan, name) for name in plan.arrays()]]
    counts = {**plan.metadata["counts"], **facts.pop("counts", {})}
    return td.PackPlan(copies, json.dumps({**plan.metadata, **facts, "counts": counts}))


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
