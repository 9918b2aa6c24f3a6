"""Packing of whole samples with costs by its definition, one sample after the other; imports nothing from tundish."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from support.packing.whole_plan import Options, Part

__all__ = ["CostLimit", "best_fit_by_cost", "in_order_by_cost"]


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


def in_order_by_cost(parts: list[Part], options: Options, window: int, limit: CostLimit) -> list[list[Part]]:
    """The packs of "ordered", and with a window of 1 of "sequential"."""
    packs: list[OpenPack] = []
    for part in parts:
        taken, cost = options.taken(part), limit.costs[part.sample]
        fitting = [pack for pack in packs[-window:] if pack.may_take(taken, cost, options)]
        if not fitting:
            fitting = [OpenPack(options.max_length, limit.max_cost, len(packs))]
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
