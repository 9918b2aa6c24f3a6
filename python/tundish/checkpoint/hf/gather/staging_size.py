"""Host memory that an export takes on each rank, counted before any of it is taken.

This is the one source of what is compared with `staging_limit_bytes` and of what the budget is charged. What always
holds: it is arithmetic on what all ranks know, so that each can count for all of them; what is counted is never less
than what staging takes, but for what a conversion needs beside its sources and products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tundish.checkpoint.hf.export_plan import ExportPlan
from tundish.checkpoint.hf.gather.exchange import Batch, Step
from tundish.checkpoint.placements import Share, shares_for

__all__ = ["Needs", "Snapshot", "room_for"]

# Buffers begin at multiples of this, so that any dtype can be seen in them.
_ALIGNMENT = 64

# Dtype and shape of what a rank remembers of a source.
Snapshot = tuple[torch.dtype, tuple[int, ...]]


def room_for(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes that a tensor takes in a buffer of several."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """What each rank of the job needs for one export.

    `rounds`: the exchanges. `is_lazy`: whether they are made in the background, of what was remembered before.
    """

    drawing: ExportPlan
    rounds: Sequence[Sequence[Batch]]
    is_lazy: bool

    def total(self, rank: int) -> int:
        """All of it, where whole files are staged."""
        remembered = sum(room_for(*snapshot) for snapshot in self.snapshots(rank).values())
        return self.files(rank) + remembered + self.exchange(rank)

    def files(self, rank: int) -> int:
        """The files that `rank` writes."""
        written = zip(self.drawing.layout.files, self.drawing.writers, strict=True)
        return sum(file.size for file, writer in written if writer == rank)

    def snapshots(self, rank: int) -> dict[int, Snapshot]:
        """What `rank` has to remember, by source, until it is gathered."""
        needed: dict[int, Snapshot] = {}
        for batch in itertools.chain.from_iterable(self.rounds if self.is_lazy else ()):
            for step, source in _wanted(batch):
                shape = self._given(rank, batch.writer, source)
                if shape is not None:
                    needed[source] = self._dtype_on_wire(step, source), shape
        return needed

    def exchange(self, rank: int) -> int:
        """What exchanges and conversions take beside the files, in the turn in which they take most."""
        return max((sum(self._in_turn(rank, batch) for batch in turn) for turn in self.rounds), default=0)

    def _in_turn(self, rank: int, batch: Batch) -> int:
        if batch.writer == rank:
            made = [product for step in batch.steps if step.unit.convert for product in step.unit.products]
            return sum(map(self._product_bytes, made)) + sum(
                self._arriving(rank, step, source) for step, source in _wanted(batch)
            )
        # What is sent may have to be converted, or made contiguous.
        return sum(
            math.prod(shape) * self._dtype_on_wire(step, source).itemsize
            for step, source in _wanted(batch)
            if (shape := self._given(rank, batch.writer, source)) is not None
        )

    def _arriving(self, rank: int, step: Step, source: int) -> int:
        """What a spread source takes while it arrives: parts that are no stretch of it, all where it is converted."""
        if not self.drawing.is_spread[source]:
            return 0
        tensor = self.drawing.tensors[source]
        itemsize = self._dtype_on_wire(step, source).itemsize
        apart = sum(
            math.prod(share.shape)
            for share in shares_for(tensor, rank)
            if share.rank != rank and not _is_stretch(share, tuple(tensor.shape))
        )
        return (apart + (tensor.numel() if step.unit.convert else 0)) * itemsize

    def _given(self, rank: int, writer: int, source: int) -> tuple[int, ...] | None:
        """The shape of what `rank` gives to `writer` of a source; None where it gives nothing."""
        tensor = self.drawing.tensors[source]
        if not self.drawing.is_spread[source]:
            return tuple(tensor.shape) if rank == writer else None
        shapes = [share.shape for share in shares_for(tensor, writer) if share.rank == rank]
        return shapes[0] if shapes else None

    def _dtype_on_wire(self, step: Step, source: int) -> torch.dtype:
        tensor = self.drawing.tensors[source]
        return tensor.dtype if step.unit.convert else self.drawing.products[step.products[0]][2]

    def _product_bytes(self, product: int) -> int:
        _, shape, dtype = self.drawing.products[product]
        return math.prod(shape) * dtype.itemsize


def _wanted(batch: Batch) -> Iterator[tuple[Step, int]]:
    return ((step, source) for step in batch.steps for source in step.unit.sources)


def _is_stretch(share: Share, shape: tuple[int, ...]) -> bool:
    """Whether a part lies in one piece: one run of the first dimension, all of the others."""
    whole = all(runs == ((0, size),) for runs, size in zip(share.runs[1:], shape[1:], strict=True))
    return whole and len(share.runs[0]) == 1
