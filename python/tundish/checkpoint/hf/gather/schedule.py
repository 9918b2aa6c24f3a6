"""The schedule by which sharded tensors are gathered: who receives what in which round.

It is arithmetic on what all ranks know, so all ranks come to the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tundish.checkpoint.hf.conversion import Unit
from tundish.checkpoint.hf.export_plan import ExportPlan

__all__ = ["ROUND_BYTES", "Batch", "Step", "gather_rounds"]

# What a writer receives in one round, unless one unit is larger.
ROUND_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A unit, and the numbers of its products."""

    unit: Unit
    products: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one writer receives in one round. `writer`: its rank in the job."""

    writer: int
    steps: tuple[Step, ...]


def gather_rounds(plan: ExportPlan, writers: Sequence[int]) -> list[list[Batch]]:
    """The rounds of an export: in each, every writer that is not done receives its next batch.

    Only what is sharded or converted takes part.
    """
    if not plan.any_sharded and not plan.conversion.converts:
        return []
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in plan.conversion.sources]
    batches = [list(_batches(plan, writer, sizes)) for writer in writers]
    count = max(map(len, batches), default=0)
    return [[one[number] for one in batches if number < len(one)] for number in range(count)]


def _batches(plan: ExportPlan, writer: int, sizes: Sequence[int]) -> Iterator[Batch]:
    taken: list[Step] = []
    filled = 0
    for step in _steps(plan, writer):
        size = sum(sizes[source] for source in step.unit.sources)
        if taken and filled + size > ROUND_BYTES:
            yield Batch(writer=writer, steps=tuple(taken))
            taken, filled = [], 0
        taken.append(step)
        filled += size
    if taken:
        yield Batch(writer=writer, steps=tuple(taken))


def _steps(plan: ExportPlan, writer: int) -> list[Step]:
    """Everything in the files of `writer` that is sharded or converted."""
    wanted: dict[int, tuple[Unit, list[int]]] = {}
    for file in plan.files_of(writer):
        for entry in file.entries:
            unit = plan.conversion.unit_of[entry.product]
            if not plan.is_direct(unit):
                wanted.setdefault(id(unit), (unit, []))[1].append(entry.product)
    return [Step(unit=unit, products=tuple(products)) for unit, products in wanted.values()]
