"""Packing of whole samples by its definition, one sample after the other; imports nothing from tundish."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np


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
class CostLimit:
    """What each sample costs, and the samples of a pack together at most."""

    costs: list[int]
    max_cost: int


@dataclass
class OpenPack:
    """A pack that is being filled."""

    left: int
    cost_left: int
    number: int
    parts: list[Part] = field(default_factory=list)

    def may_take(self, taken: int, cost: int, options: Options) -> bool:
        return self.left >= taken and self.cost_left >= cost and len(self.parts) < options.most

    def add(self, part: Part, taken: int, cost: int) -> None:
        self.left -= taken
        self.cost_left -= cost
        self.parts.append(part)


def packed_in_order(
    parts: list[Part], options: Options, window: int, limit: CostLimit | None = None
) -> list[list[Part]]:
    """The packs of "ordered", and with a window of 1 of "sequential"."""
    packs: list[OpenPack] = []
    for part in parts:
        taken, cost = options.taken(part), limit.costs[part.sample] if limit else 0
        fitting = [pack for pack in packs[-window:] if pack.may_take(taken, cost, options)]
        if not fitting:
            fitting = [OpenPack(options.max_length, limit.max_cost if limit else 0, len(packs))]
            packs += fitting
        min(fitting, key=lambda pack: (pack.left, pack.number)).add(part, taken, cost)
    return [pack.parts for pack in packs]


def best_fit_by_cost(
    parts: list[Part], options: Options, limit: CostLimit, random: np.random.RandomState, *, is_seeded: bool
) -> list[list[Part]]:
    """The packs of "best_fit", in their random order."""
    packs: list[OpenPack] = []
    longest_first = sorted(parts, key=lambda part: -part.tokens)
    for _, group in groupby(longest_first, key=lambda part: part.tokens):
        run = list(group)
        if is_seeded:
            numbers = np.arange(len(run))
            random.shuffle(numbers)
            run = [run[number] for number in numbers]
        for part in run:
            taken, cost = options.taken(part), limit.costs[part.sample]
            fitting = [pack for pack in packs if pack.may_take(taken, cost, options)]
            if not fitting:
                fitting = [OpenPack(options.max_length, limit.max_cost, len(packs))]
                packs += fitting
            min(fitting, key=lambda pack: (pack.left, pack.cost_left, pack.number)).add(part, taken, cost)
    order = np.arange(len(packs))
    random.shuffle(order)
    return [packs[number].parts for number in order]


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


def expected_columns(streams: list[list[list[Part]]], has_parts: bool) -> dict[str, list[int]]:
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
