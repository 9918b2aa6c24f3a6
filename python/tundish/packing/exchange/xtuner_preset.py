"""Exports a plan as a preset of XTuner v1 (`pack_level="preset"`).

The layout is that of `xtuner/v1/datasets/preset_pack.py` and `preset_sampler.py`:

- `boundaries.npy`: int64, (packs + 1,): pack *i* has the rows `boundaries[i]` … `boundaries[i + 1]` - 1 of
- `samples.npy`: int64, (pieces, 6): path number, sample, first and last character (-1: none), first token, one past the
  last token
- `paths.json`: the path of each dataset
- `order.npy`: int64, numbers of packs in the order in which they are taken
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tundish.packing.arguments.integer_arrays import IntegerArray
from tundish.packing.new_folder import NewFolder
from tundish.packing.plan.pack_plan import PackPlan
from tundish.packing.plan.slices import piece_slices

__all__ = ["BOUNDARIES", "COLUMNS", "PATHS", "PIECES", "write_preset"]

BOUNDARIES, PIECES, PATHS, ORDER = "boundaries.npy", "samples.npy", "paths.json", "order.npy"
# Columns of `samples.npy`. Those of characters are for long texts that XTuner cuts itself.
COLUMNS = ("path", "sample", "first_character", "last_character", "start", "stop")
_INT64 = np.dtype(np.int64)


def write_preset(plan: PackPlan, folder: NewFolder, paths: Sequence[str], order: IntegerArray) -> None:
    """Write the files of a preset.

    Raises:
        InvalidInputError: The plan has no lengths.
    """
    boundaries = np.zeros(len(plan) + 1, dtype=np.int64)
    first = 1
    for part in piece_slices(plan, 0, len(plan)):
        boundaries[first : first + len(part.counts)] = part.counts
        first += len(part.counts)
    np.cumsum(boundaries, out=boundaries)
    folder.write_array(BOUNDARIES, boundaries)
    folder.begin_array(PIECES, _INT64, (int(boundaries[-1]), len(COLUMNS)))
    for part in piece_slices(plan, 0, len(plan)):
        no_character = np.full(len(part.sample), -1)
        columns = (part.dataset, part.sample, no_character, no_character, part.start, part.stop)
        folder.append(PIECES, np.stack(columns, axis=1).astype(np.int64))
    folder.write_json(PATHS, list(paths))
    folder.write_array(ORDER, order.astype(np.int64))
