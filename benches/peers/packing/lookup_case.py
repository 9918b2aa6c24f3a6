"""Look-up of packs from a mapped plan.

Compares `plan.lookup` and `plan[i]` with indexing the mapped arrays by hand. Invariant: all contestants look up the
same packs and find the same pieces.
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
from measure import Contestant, OutputsDiffer, race
from report import Row, Section, count, times_faster

import tundish as td
from packing import numpy_forms
from packing.cases import MAX_LENGTH, Scale
from packing.distributions import DISTRIBUTIONS, RANDOM_SEED, Distribution, draw_lengths, draw_order

BATCH = 1024
MAPPED = "numpy on the mapped arrays"
VIEWED = "numpy on plain views of the mapped arrays"


def lookup(scale: Scale) -> Section:
    """Random packs, pieces included, in batches."""
    samples = scale.samples[-1]
    section = Section(
        title=f"Look-up of packs in batches of {BATCH}",
        note="`plan.lookup(ids)` on `PackPlan.load(folder)` against a Python loop that takes dataset, "
        "samples, starts and stops of each pack from the arrays of `numpy.load(..., "
        'mmap_mode="r")`, as the original does. Plain views of the same maps save the loop the cost '
        "of numpy's memmap class and are shown for information, as are `plan[i]` objects. Each "
        f"figure is over {scale.batches} batches of random packs; nanoseconds are per pack.",
    )
    for distribution in DISTRIBUTIONS:
        section.rows += _rows(scale, samples, distribution)
    return section


def _as_columns(found: list[numpy_forms.PackPieces]) -> list[list[int]]:
    pieces_after = np.cumsum([0, *(len(samples) for _, samples, _, _ in found)]).tolist()
    columns: list[list[int]] = [[dataset for dataset, _, _, _ in found], pieces_after]
    columns += [[value for pack in found for value in pack[column]] for column in (1, 2, 3)]
    return columns


def _objects_as_columns(packs: list[td.Pack]) -> list[list[int]]:
    return _as_columns(
        [
            (
                pack.dataset_id,
                [piece.sample for piece in pack.pieces],
                [piece.start for piece in pack.pieces],
                [-1 if piece.stop is None else piece.stop for piece in pack.pieces],
            )
            for pack in packs
        ]
    )


def _batch_as_columns(batch: Any) -> list[list[int]]:
    return [
        column.tolist()
        for column in (batch.dataset_id, batch.piece_cu, batch.sample, batch.start, batch.stop)
    ]


def _rows(scale: Scale, samples: int, distribution: Distribution) -> list[Row]:
    folder = scale.folder / "plan"
    lengths, order = draw_lengths(samples, distribution), draw_order(samples)
    td.pack(lengths, MAX_LENGTH, order=order, out=folder, progress=False)
    plan = td.PackPlan.load(folder)
    mapped = numpy_forms.map_again(folder)
    viewed = {field: array.view(np.ndarray) for field, array in mapped.items()}
    generator = np.random.default_rng(RANDOM_SEED)
    batches = list(generator.integers(0, len(plan), (scale.batches, BATCH)))

    contestants = {
        "lookup": Contestant(lambda: [plan.lookup(ids) for ids in batches], len),
        MAPPED: Contestant(lambda: [numpy_forms.look_up(mapped, ids) for ids in batches], len),
        VIEWED: Contestant(lambda: [numpy_forms.look_up(viewed, ids) for ids in batches], len),
        "objects": Contestant(lambda: [[plan[i] for i in ids.tolist()] for ids in batches], len),
    }
    seconds = race(contestants, scale.rounds(0))
    for ids in batches:
        expected = _as_columns(numpy_forms.look_up(mapped, ids))
        if _batch_as_columns(plan.lookup(ids)) != expected:
            raise OutputsDiffer(f"look-up, {distribution.name}: tundish and numpy disagree")
        if _objects_as_columns([plan[i] for i in ids.tolist()]) != expected:
            raise OutputsDiffer(f"plan[i], {distribution.name}: tundish and numpy disagree")
    shutil.rmtree(folder)

    packs = scale.batches * BATCH
    case = f"{distribution.name}, {count(samples)}"
    return [
        times_faster(case, seconds["lookup"], MAPPED, seconds[MAPPED], samples=packs),
        times_faster(case, seconds["lookup"], VIEWED, seconds[VIEWED], samples=packs),
        times_faster(f"{case}, `plan[i]`", seconds["objects"], MAPPED, seconds[MAPPED], samples=packs),
    ]
