"""Mixing by its definition, with fractions and numpy's orders; imports nothing from tundish."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

Stages = list[tuple[int, list[Any]]]


def reference_mix(
    packs: list[int],
    stages: Stages,
    *,
    seed: int,
    exhausted: str,
    epochs: int | None,
    num_packs: int | None,
) -> list[tuple[int, int]]:
    """The plan and the pack in each place; `stages` are the places where weights begin, with the weights."""
    order: list[tuple[int, int]] = []
    taken = [0] * len(packs)

    def is_through(plan: int) -> bool:
        return epochs is not None and taken[plan] >= epochs * packs[plan]

    def is_over(active: dict[int, Fraction]) -> bool:
        if len(order) == num_packs or not active:
            return True
        if exhausted == "stop":
            return any(map(is_through, active))
        return all(map(is_through, active))

    stops = [start for start, _ in stages[1:]] + [math.inf]
    for (_, weights), stop in zip(stages, stops, strict=True):
        active = {plan: Fraction(weight) for plan, weight in enumerate(weights) if weight}
        if exhausted == "drop":
            active = {plan: weight for plan, weight in active.items() if not is_through(plan)}
        turn, counted = 0, dict.fromkeys(active, 0)
        while len(order) < stop and not is_over(active):
            turn += 1
            total = sum(active.values())
            behind = [plan for plan in active if active[plan] * turn / total > counted[plan]]
            chosen = min(behind, key=lambda plan: math.ceil((counted[plan] + 1) * total / active[plan]))
            epoch, place = divmod(taken[chosen], packs[chosen])
            order.append((chosen, int(epoch_order(seed, chosen, epoch, packs[chosen])[place])))
            taken[chosen] += 1
            counted[chosen] += 1
            if exhausted == "drop" and is_through(chosen):
                del active[chosen]
                turn, counted = 0, dict.fromkeys(active, 0)
    return order


def epoch_order(seed: int, plan: int, epoch: int, packs: int) -> np.ndarray:
    order = np.arange(packs)
    np.random.RandomState([seed, plan, epoch]).shuffle(order)
    return order
