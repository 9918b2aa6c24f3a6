"""How an export is divided: what of it takes exchanges or conversions, and the turns and windows in which that happens.

What always holds: it is arithmetic on what all ranks know, so that all come to the same turns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tundish.checkpoint.hf.conversion import Unit
from tundish.checkpoint.hf.export_plan import ExportPlan
from tundish.checkpoint.hf.gather.exchange import Batch, Step, batched, in_rounds
from tundish.checkpoint.hf.gather.staging_size import Needs
from tundish.checkpoint.hf.shards import Entry, ShardFile
from tundish.checkpoint.hf.write_through import Window, windows_of
from tundish.distributed import GroupInfo

__all__ = ["GatherSchedule", "Through"]

# A save that writes through shares its limit: exchanges have turns of this part of it, windows have what is left.
_TURN_PART = 8


@dataclass(frozen=True, kw_only=True)
class Through:
    """How a save is written while it is staged: this rank's windows, what they may take, and the exchanges."""

    limit_bytes: int
    own: list[Window]
    rounds: list[list[Batch]]
    windows_bytes: int
    exchange_bytes: int


class GatherSchedule:
    """The turns of one export, as `member` takes part in them.

    `any_spread`: whether ranks exchange anything. `writers`: the ranks whose files this rank has a part in. `rounds`:
    what happens where whole files are staged.
    """

    def __init__(self, drawing: ExportPlan, member: GroupInfo) -> None:
        self._drawing = drawing
        self._member = member
        self._known_through: Through | None = None
        self.any_spread = any(drawing.is_spread)
        self.writers = member.ranks if self.any_spread else (member.rank,)
        self.rounds = in_rounds([list(self._batches_of(writer)) for writer in self.writers])

    def is_direct(self, unit: Unit) -> bool:
        """Whether a unit needs neither other ranks nor a conversion."""
        return unit.convert is None and not self._drawing.is_spread[unit.sources[0]]

    def files_of(self, writer: int) -> list[ShardFile]:
        """The files that the rank `writer` of the job writes."""
        files = zip(self._drawing.layout.files, self._drawing.writers, strict=True)
        return [file for file, other in files if other == writer]

    def through(self, limit_bytes: int) -> Through:
        """How files larger than the limit are written; windows have what the exchanges leave of it."""
        known = self._known_through
        if known is None or known.limit_bytes != limit_bytes:
            known = self._known_through = self._divide(limit_bytes)
        return known

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) * dtype.itemsize for _, shape, dtype in self._drawing.conversion.sources]

    def _batches_of(self, writer: int) -> Iterator[Batch]:
        if self.any_spread or self._drawing.conversion.converts:
            entries = [entry for file in self.files_of(writer) for entry in file.entries]
            yield from batched(writer, 0, self._steps(entries, all_of_them=False), self._sizes)

    def _steps(self, entries: Sequence[Entry], *, all_of_them: bool) -> list[Step]:
        """What fills `entries`, but for what is direct unless `all_of_them` is meant."""
        wanted: dict[int, tuple[Unit, list[int]]] = {}
        for entry in entries:
            unit = self._drawing.conversion.unit_of[entry.product]
            if all_of_them or not self.is_direct(unit):
                wanted.setdefault(id(unit), (unit, []))[1].append(entry.product)
        return [Step(unit=unit, products=tuple(products)) for unit, products in wanted.values()]

    def _divide(self, limit_bytes: int) -> Through:
        # Of which windows leave how much is known when they are cut: first as if exchanges took nothing.
        first = self._cut(limit_bytes // 2, limit_bytes)
        exchange = max(
            Needs(drawing=self._drawing, rounds=first[1], is_lazy=False).exchange(rank) for rank in first[0]
        )
        windows_bytes = max(1, limit_bytes - exchange)
        windows, rounds = self._cut(windows_bytes // 2, limit_bytes)
        needs = Needs(drawing=self._drawing, rounds=rounds, is_lazy=False)
        return Through(
            limit_bytes=limit_bytes,
            own=windows[self._member.rank],
            rounds=rounds,
            windows_bytes=windows_bytes,
            exchange_bytes=needs.exchange(self._member.rank),
        )

    def _cut(self, window_bytes: int, limit_bytes: int) -> tuple[dict[int, list[Window]], list[list[Batch]]]:
        """WriteWindows by writer, and the exchanges that fill them."""
        windows = {writer: windows_of(self.files_of(writer), window_bytes) for writer in self.writers}
        turn_bytes = max(1, limit_bytes // _TURN_PART)
        batches = [
            [
                batch
                for number, window in enumerate(cut)
                for batch in batched(
                    writer, number, self._steps(window.entries, all_of_them=True), self._sizes, turn_bytes
                )
            ]
            for writer, cut in windows.items()
        ]
        return windows, in_rounds(batches)
