"""`compare`: what each packing mode costs for given lengths."""

from __future__ import annotations

import time
from typing import Any

from tundish.packing.arguments.integer_arrays import as_integer_array
from tundish.packing.build.pack import pack
from tundish.packing.build.request import MODES

__all__ = ["compare"]

# The statistics of a plan that a comparison shows.
SHOWN = ("packs", "fill", "samples_cut", "samples_overlong", "tokens_dropped", "padding")


def compare(
    lengths: Any,
    max_length: int,
    *,
    overlong: str = "split",
    window: int | None = None,
    max_samples: int | None = None,
    align: int = 1,
    costs: Any = None,
    max_cost: int | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> dict[str, dict[str, int | float]]:
    """Pack the lengths in every mode, and tell what each costs.

    Each plan is in memory, and is freed before the next one is made.

    Args:
        lengths: As `tundish.pack` takes them.
        max_length: As in `tundish.pack`; at most 2**28.
        overlong: As in `tundish.pack`, for the modes of whole samples.
        window: As in `tundish.pack`, for "ordered".
        max_samples: As in `tundish.pack`, for the modes of whole samples.
        align: As in `tundish.pack`, for the modes of whole samples.
        costs: As in `tundish.pack`, for the modes of whole samples; with `overlong` other than "split".
        max_cost: As in `tundish.pack`, for the modes of whole samples.
        seed: As in `tundish.pack`.
        threads: As in `tundish.pack`.
        progress: As in `tundish.pack`.

    Returns:
        By mode: packs, fill, samples_cut, samples_overlong, tokens_dropped and padding, as `PackPlan.stats` counts
        them, and the seconds that packing took.

    Raises:
        TundishError: As `tundish.pack`.

    Example:
        >>> table = compare([6, 6, 4, 4], 10)
        >>> {mode: row["packs"] for mode, row in table.items()}
        {'hard': 2, 'best_fit': 2, 'ordered': 2, 'sequential': 3}
    """
    array = as_integer_array(lengths, "lengths")
    shared: dict[str, Any] = {"seed": seed, "threads": threads, "progress": progress}
    whole: dict[str, Any] = {"overlong": overlong, "max_samples": max_samples, "align": align}
    whole |= {"costs": costs, "max_cost": max_cost}
    table = {}
    for mode in MODES:
        options = {} if mode == "hard" else whole
        if mode == "ordered":
            options = {**whole, "window": window}
        start = time.perf_counter()
        plan = pack(array, max_length, mode=mode, **shared, **options)
        seconds = time.perf_counter() - start
        stats = plan.stats()
        del plan
        table[mode] = {**{name: stats[name] for name in SHOWN}, "seconds": seconds}
    return table
