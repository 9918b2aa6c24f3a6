"""Packing of whole samples by its definition, one sample after the other; imports nothing from tundish."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple


class Part(NamedTuple):
    """The tokens `start` … `stop` - 1 of a sample."""

    sample: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass
class Options:
    """The options of a mode of whole samples."""

    max_length: int
    overlong: str = "error"
    window: int | None = None
    max_samples: int | None = None
    align: int = 1

    @property
    def most(self) -> int | float:
        return float("inf") if self.max_samples is None else self.max_samples

    def taken(self, part: Part) -> int:
        """Tokens of its pack that a part takes."""
        return -(-part.tokens // self.align) * self.align


def parts_of(lengths: list[int], order: list[int], options: Options) -> list[Part]:
    """What is packed of each sample, in the order."""
    parts = []
    for sample in order:
        tokens = lengths[sample]
        if tokens <= options.max_length:
            parts.append(Part(sample, 0, tokens))
        elif options.overlong == "split":
            bounds = [*range(0, tokens, options.max_length), tokens]
            parts += [Part(sample, start, stop) for start, stop in pairwise(bounds)]
        elif options.overlong == "truncate":
            parts.append(Part(sample, 0, options.max_length))
        else:
            assert options.overlong == "drop"
    return [part for part in parts if part.tokens]


@dataclass
class OpenPack:
    """A pack that is being filled."""

    left: int
    parts: list[Part] = field(default_factory=list)


def packed_in_order(parts: list[Part], options: Options, window: int) -> list[list[Part]]:
    """The packs of "ordered", and with a window of 1 of "sequential"."""
    packs: list[OpenPack] = []
    for part in parts:
        taken = options.taken(part)
        fitting = [pack for pack in packs[-window:] if pack.left >= taken and len(pack.parts) < options.most]
        if not fitting:
            fitting = [OpenPack(options.max_length)]
            packs += fitting
        # The first of those with the least left is the oldest.
        best = min(fitting, key=lambda pack: pack.left)
        best.left -= taken
        best.parts.append(part)
    return [pack.parts for pack in packs]


def best_fit_packs(parts: list[Part], options: Options) -> int:
    """The number of packs of best-fit decreasing. Of packs with the same room, one with the fewest parts is first."""
    # Room and parts of each pack that may take more parts, sorted.
    open_packs: list[tuple[int, int]] = []
    packs = 0
    for taken in sorted(map(options.taken, parts), reverse=True):
        place = bisect_left(open_packs, (taken, 0))
        if place < len(open_packs):
            left, count = open_packs.pop(place)
        else:
            left, count = options.max_length, 0
            packs += 1
        if count + 1 < options.most:
            insort(open_packs, (left - taken, count + 1))
    return packs


def columns_of(streams: list[list[list[Part]]], has_parts: bool) -> dict[str, list[int]]:
    """The columns of a plan of these packs, one list of packs a dataset."""
    numbered = [(number, pack) for number, packs in enumerate(streams) for pack in packs]
    parts = [part for _, pack in numbered for part in pack]
    columns = {
        "dataset_id": [number for number, _ in numbered],
        "indices": [part.sample for part in parts],
        "indices_cu_len": list(accumulate(len(pack) for _, pack in numbered)),
        "start_offset": [pack[0].start for _, pack in numbered],
        "end_offset": [pack[-1].stop for _, pack in numbered],
        "longest": [max(part.tokens for part in pack) for _, pack in numbered],
    }
    if has_parts:
        columns["piece_start"] = [part.start for part in parts]
        columns["piece_stop"] = [part.stop for part in parts]
    return columns
