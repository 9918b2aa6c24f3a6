"""Helpers for tests of `PackedBatchSampler`: plans, splits over ranks, and the packs that all ranks take together."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from hypothesis import strategies as st

import tundish as td


def plan_of(packs: int) -> td.PackPlan:
    return td.pack(np.ones(packs, dtype=np.int64), 1)


@st.composite
def splits(draw: Any) -> tuple[int, int, int]:
    """A global batch and two numbers of ranks that divide it."""
    first, second, times = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return first * second * times, first, second


options = st.fixed_dictionaries(
    {"shuffle": st.just(True), "drop_last": st.booleans(), "group_by_longest": st.booleans()}
) | st.fixed_dictionaries({"shuffle": st.just(False), "drop_last": st.booleans()})


def samplers_of(
    plan: td.PackPlan | td.PackMix, global_batch: int, ranks: int, **given: Any
) -> list[td.PackedBatchSampler]:
    return [
        td.PackedBatchSampler(plan, global_batch // ranks, rank=rank, world_size=ranks, **given)
        for rank in range(ranks)
    ]


def global_batches(samplers: list[td.PackedBatchSampler]) -> list[list[int]]:
    """The packs that all ranks together take at each step, the ranks in order."""
    return [list(chain(*parts)) for parts in zip(*map(list, samplers), strict=True)]
