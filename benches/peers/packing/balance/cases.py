"""Balanced parts of the samples of one reinforcement-learning step, beside verl."""

from __future__ import annotations

from typing import Any

from measure import Contestant, OutputsDiffer, race
from report import Row, Section, compared, count

import tundish as td
from packing.balance.verl_partitions import balanced_partitions
from packing.cases import Scale
from packing.distributions import CHAT, draw_lengths

VERL = "verl get_seqlen_balanced_partitions"
SAMPLES = (1000, 10_000)
PARTS = (8, 64)


def balance(scale: Scale) -> Section:
    """Tokens balanced over parts, with and without equal counts."""
    section = Section(
        title="Balanced parts of one step",
        note="`td.packing.balance(lengths, parts)` against verl's `get_seqlen_balanced_partitions`. tundish takes an "
        "int32 array, verl the list of its numbers. Both find the same parts, which are compared in full. "
        "Nanoseconds are per sample.",
    )
    for samples in SAMPLES:
        for parts in PARTS:
            section.rows += [_row(scale, samples, parts, equal_counts=False)]
            if samples % parts == 0:
                section.rows += [_row(scale, samples, parts, equal_counts=True)]
    return section


def _row(scale: Scale, samples: int, parts: int, *, equal_counts: bool) -> Row:
    lengths = draw_lengths(samples, CHAT)
    numbers = lengths.tolist()
    partitions = balanced_partitions()

    def ours() -> Any:
        return td.packing.balance(lengths, parts, equal_counts=equal_counts)

    def theirs() -> Any:
        return partitions(numbers, parts, equal_size=equal_counts)

    seconds = race({"tundish": Contestant(ours, len), VERL: Contestant(theirs, len)}, scale.least_rounds)
    case = f"{CHAT.name}, {count(samples)}, {parts} parts" + (", equal counts" if equal_counts else "")
    if sorted(part.tolist() for part in ours()) != sorted(sorted(part) for part in theirs()):
        raise OutputsDiffer(f"{case}: tundish and verl disagree")
    return compared(case, seconds["tundish"], VERL, seconds[VERL], samples=samples)
