"""`compare`: what each packing mode costs for given lengths."""

from __future__ import annotations

import os
import time
from typing import Any

from tundish.errors import InvalidTypeError, format_share
from tundish.packing.arguments import as_integer_array
from tundish.packing.inspection.plot import (
    BLUE,
    INK,
    ORANGE,
    PALE,
    as_picture_path,
    frame,
    legend,
    short,
    stacked_bar,
    write_figure,
)
from tundish.packing.planning import pack

MODES = ("hard", "best_fit", "ordered", "sequential")
# The options, and the modes that take them.
_WHOLE = ("best_fit", "ordered", "sequential")
_OPTIONS = {
    **dict.fromkeys(("seed", "threads", "progress"), MODES),
    **dict.fromkeys(("overlong", "max_samples", "align", "costs", "max_cost"), _WHOLE),
    "window": ("ordered",),
}
# The statistics of a plan that a comparison shows.
SHOWN = ("packs", "fill", "samples_cut", "samples_overlong", "tokens_dropped", "padding")


def compare(
    lengths: Any,
    max_length: int,
    *,
    plot: str | os.PathLike[str] | None = None,
    **options: Any,
) -> dict[str, dict[str, int | float]]:
    """Pack the lengths in every mode, and tell what each costs.

    Each plan is in memory, and is freed before the next one is made.

    Args:
        lengths: As `tundish.pack` takes them.
        max_length: As in `tundish.pack`; below 2**25 with the default window of "ordered".
        plot: Draw the table to this file, too: `.png`, `.svg` or `.pdf`.
        **options: `overlong`, `window`, `max_samples`, `align`, `costs`, `max_cost`, `seed`, `threads` and `progress`,
            as in `tundish.pack`; each mode gets those that it takes. `overlong` is "split" by default, so that samples
            longer than a pack are no error.

    Returns:
        By mode: packs, fill, samples_cut, samples_overlong, tokens_dropped and padding, as `PackPlan.stats` counts
        them, and the seconds that packing took.

    Raises:
        TundishError: As `tundish.pack`, and for `plot` as `PackPlan.plot`.

    Example:
        >>> table = compare([6, 6, 4, 4], 10)
        >>> {mode: row["packs"] for mode, row in table.items()}
        {'hard': 2, 'best_fit': 2, 'ordered': 2, 'sequential': 3}
    """
    target = None if plot is None else as_picture_path(plot)
    array = as_integer_array(lengths, "lengths")
    for name in options.keys() - _OPTIONS.keys():
        raise InvalidTypeError(f"there is no option {name:.100}; the options are {', '.join(_OPTIONS)}")
    options = {"overlong": "split", **options}
    table = {}
    for mode in MODES:
        taken = {name: value for name, value in options.items() if mode in _OPTIONS[name]}
        start = time.perf_counter()
        packed = pack(array, max_length, mode=mode, **taken)
        seconds = time.perf_counter() - start
        stats = packed.stats()
        del packed
        table[mode] = {**{name: stats[name] for name in SHOWN}, "seconds": seconds}
    if target is not None:
        title = f"{len(array):,} samples in packs of up to {max_length:,} tokens"
        write_figure(target, (12, 6), lambda figure: draw_table(figure, table, max_length, title))
    return table


def draw_table(figure: Any, table: dict[str, dict[str, int | float]], max_length: int, title: str) -> None:
    """Draw a bar for each mode: the tokens that are packed, the padding beside them, and the tokens that are lost."""
    axes = figure.add_axes((0.11, 0.1, 0.86, 0.76))
    frame(axes, title, "", "")
    full = {mode: row["packs"] * max_length for mode, row in table.items()}
    widest = max(1.0, *(full[mode] + row["tokens_dropped"] for mode, row in table.items()))
    for number, (mode, row) in enumerate(table.items()):
        text = (
            f"{row['packs']:,} packs, {format_share(row['fill'])} full, {short(row['samples_cut'])} samples cut, "
            f"{short(row['tokens_dropped'])} tokens dropped, {1000 * row['seconds']:.3g} ms"
        )
        packed = (full[mode] - row["padding"], BLUE)
        stacked_bar(
            axes, number, [packed, (row["padding"], PALE), (row["tokens_dropped"], ORANGE)], widest, text
        )
    axes.set_yticks(range(len(table)), list(table), fontsize=11, color=INK)
    axes.set_ylim(len(table) - 0.5, -0.75)
    legend(axes, [("tokens in packs", BLUE), ("padding", PALE), ("dropped", ORANGE)], "below")
