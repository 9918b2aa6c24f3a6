"""The schedule by which sharded tensors are gathered, and the host memory that it takes.

It is arithmetic on facts that all ranks know, so all ranks compute the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tundish.checkpoint.hf.conversion import ConversionUnit
from tundish.checkpoint.hf.export_plan import ExportPlan
from tundish.checkpoint.placements import rank_parts_of

__all__ = [
    "ROUND_BYTES",
    "GatherBatch",
    "GatherUnit",
    "Snapshot",
    "exchange_bytes",
    "gather_rounds",
    "snapshots",
]

# Bytes that a writer receives in one round, unless one unit is larger.
ROUND_BYTES = 64 << 20

# Dtype and shape of a rank's part of a source.
Snapshot = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherUnit:
    """A unit, and the numbers of those of its products that a writer needs."""

    unit: ConversionUnit
    products: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherBatch:
    """The items of one writer in one round. `writer`: its rank in the job."""

    writer: int
    items: tuple[GatherUnit, ...]

    def sources(self) -> Iterator[tuple[GatherUnit, int]]:
        """Each source of each item."""
        return ((item, source) for item in self.items for source in item.unit.sources)


def gather_rounds(plan: ExportPlan, writers: Sequence[int]) -> list[list[GatherBatch]]:
    """The rounds of an export: in each, every writer that is not done receives its next batch.

    Only tensors that are sharded or converted take part.
    """
    if not plan.any_sharded and not plan.conversion.converts:
        return []
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in plan.conversion.sources]
    batches = [list(_batches(plan, writer, sizes)) for writer in writers]
    count = max(map(len, batches), default=0)
    return [[batch[number] for batch in batches if number < len(batch)] for number in range(count)]


def snapshots(plan: ExportPlan, rounds: Sequence[Sequence[GatherBatch]], rank: int) -> dict[int, Snapshot]:
    """The parts of sources, by their numbers, that `rank` has to keep until a lazy save gathers them."""
    needed: dict[int, Snapshot] = {}
    for batch in (batch for batches in rounds for batch in batches):
        for item, source in batch.sources():
            shape = _sent_shape(plan, rank, batch.writer, source)
            if shape is not None:
                needed[source] = plan.sent_dtype(item.unit, source), shape
    return needed


def exchange_bytes(plan: ExportPlan, rounds: Sequence[Sequence[GatherBatch]], rank: int) -> int:
    """Most bytes that exchanges and conversions take beside the files, in any round.

    Staging takes no more, except for memory that a conversion needs beside its sources and products.
    """
    return max((sum(_batch_bytes(plan, batch, rank) for batch in batches) for batches in rounds), default=0)


def _batches(plan: ExportPlan, writer: int, sizes: Sequence[int]) -> Iterator[GatherBatch]:
    taken: list[GatherUnit] = []
    filled = 0
    for item in _items(plan, writer):
        size = sum(sizes[source] for source in item.unit.sources)
        if taken and filled + size > ROUND_BYTES:
            yield GatherBatch(writer=writer, items=tuple(taken))
            taken, filled = [], 0
        taken.append(item)
        filled += size
    if taken:
        yield GatherBatch(writer=writer, items=tuple(taken))


def _items(plan: ExportPlan, writer: int) -> list[GatherUnit]:
    """All units in the files of `writer` that are sharded or converted."""
    wanted: dict[int, tuple[ConversionUnit, list[int]]] = {}
    for file in plan.files_of(writer):
        for product in file.products:
            unit = plan.conversion.unit_of[product]
            if not plan.is_direct(unit):
                wanted.setdefault(id(unit), (unit, []))[1].append(product)
    return [GatherUnit(unit=unit, products=tuple(products)) for unit, products in wanted.values()]


def _batch_bytes(plan: ExportPlan, batch: GatherBatch, rank: int) -> int:
    if batch.writer != rank:
        # A part may have to be converted, or made contiguous, before it is sent.
        return sum(
            math.prod(shape) * plan.sent_dtype(item.unit, source).itemsize
            for item, source in batch.sources()
            if (shape := _sent_shape(plan, rank, batch.writer, source)) is not None
        )
    made = [product for item in batch.items if item.unit.convert for product in item.unit.products]
    taken = sum(map(plan.product_bytes, made))
    for item, source in batch.sources():
        if plan.is_sharded[source]:
            # Parts that are not contiguous in the tensor arrive beside it, and a converted tensor beside the file.
            tensors = 2 if item.unit.convert else 1
            taken += tensors * plan.tensors[source].numel() * plan.sent_dtype(item.unit, source).itemsize
    return taken


def _sent_shape(plan: ExportPlan, rank: int, writer: int, source: int) -> tuple[int, ...] | None:
    """The shape of the part of a source that `rank` gives to `writer`; None if it gives none."""
    tensor = plan.tensors[source]
    if not plan.is_sharded[source]:
        return tuple(tensor.shape) if rank == writer else None
    shapes = [rank_part.shape for rank_part in rank_parts_of(tensor, writer) if rank_part.rank == rank]
    return shapes[0] if shapes else None
