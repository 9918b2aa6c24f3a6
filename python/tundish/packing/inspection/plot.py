"""Plots a plan to a file.

Invariants: the plan is read in slices, so that memory does not grow with it. The user's own pyplot state is not used.
The file appears complete and durable.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tundish import _native
from tundish.errors import InvalidInputError, NotFoundError, format_count, format_share, missing_extra
from tundish.packing.arguments import as_path
from tundish.packing.inspection.plan_stats import (
    PlanReader,
    lengths_of,
    pack_slices,
    piece_slices,
    plan_stats,
)

# Counts of pieces a pack from here on are one.
LAST_BIN = 1 << 16
FORMATS = (".png", ".svg", ".pdf")
# Lengths are counted in bins of equal ratio, so many a doubling, and drawn in bars of several bins.
BINS_A_DOUBLING = 32
BINS_A_BAR = 8
# What a plan is compared with: batches of so many samples, each padded to its longest.
PADDED_BATCH = 8

INK, SOFT, GRID = "#22303c", "#6b7a88", "#e3e8ec"
BLUE, ORANGE, PALE = "#2f6f9f", "#d9772b", "#b9cfdf"


@dataclass
class PlotCounts:
    """The counts that the plot shows. Samples without tokens are not counted.

    Attributes:
        edges: Bounds of the bins of lengths; the last one is the pack length, which is in the last bin.
        lengths: Samples by length, those that are longer than a pack left out. Without lengths, packs by their longest
            piece.
        tokens: Tokens of these samples, by the same bins.
        longer: Samples longer than a pack.
        longest: The length of the longest sample.
        cut_off: Tokens of samples behind the pack length.
        pieces: Packs by their number of pieces.
    """

    edges: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    longer: int = 0
    longest: int = 0
    cut_off: int = 0
    pieces: np.ndarray = field(default_factory=lambda: np.zeros(LAST_BIN + 1, np.int64))

    @classmethod
    def of_pack_length(cls, max_length: int) -> PlotCounts:
        """No counts yet."""
        grid = 2.0 ** (np.arange(-BINS_A_DOUBLING, 63 * BINS_A_DOUBLING) / BINS_A_DOUBLING)
        edges = np.append(grid[grid < max_length], max_length)
        return cls(edges, np.zeros(len(edges) - 1, np.int64), np.zeros(len(edges) - 1))

    def add(self, lengths: np.ndarray) -> None:
        """Count samples of these lengths."""
        fitting = lengths[lengths <= self.edges[-1]]
        self.lengths += np.histogram(fitting, self.edges)[0]
        self.tokens += np.histogram(fitting, self.edges, weights=fitting)[0]
        self.longer += len(lengths) - len(fitting)
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.cut_off += int(lengths.sum() - fitting.sum()) - (len(lengths) - len(fitting)) * int(
            self.edges[-1]
        )

    def padding(self) -> float:
        """The tokens of padding of random batches of `PADDED_BATCH` samples, each cut off at the pack length.

        The longest of n samples is at most x with the probability F(x)ⁿ, where F is the share of samples up to x.
        """
        counts = np.append(self.lengths, self.longer)
        tokens = np.append(self.tokens, self.longer * self.edges[-1])
        samples = counts.sum()
        if not samples:
            return 0.0
        means = tokens / np.maximum(counts, 1)
        is_longest = np.diff((np.cumsum(counts) / samples) ** min(PADDED_BATCH, samples), prepend=0.0)
        return float(samples * (means * is_longest).sum() - tokens.sum())


def plot_plan(plan: PlanReader, path: str | os.PathLike[str]) -> Path:
    """Plot `plan` to `path` (see `PackPlan.plot`), and return the path."""
    target = as_picture_path(path)
    return write_figure(target, (12, 8), lambda figure: _draw(figure, plan, count(plan)))


def as_picture_path(path: str | os.PathLike[str]) -> Path:
    """The path of a picture.

    Raises:
        InvalidInputError: It has another ending than those of `FORMATS`.
        NotFoundError: Its folder does not exist.
        MissingExtraError: matplotlib is not installed.
    """
    target = as_path(path, "path")
    if target.suffix.lower() not in FORMATS:
        raise InvalidInputError(
            f"{target}: a plot is written as one of {', '.join(FORMATS)}; name the file so"
        )
    if not target.parent.is_dir():
        raise NotFoundError(2, "no such folder to write the plot to; make it first", str(target.parent))
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        missing_extra("plot", "matplotlib", "plotting a plan")
    return target


def write_figure(target: Path, inches: tuple[float, float], draw: Callable[[Any], None]) -> Path:
    """Draw a figure of this size to a file, and return its path."""
    import matplotlib.backends.backend_agg as agg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=150, facecolor="white")
    agg.FigureCanvasAgg(figure)
    draw(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format=target.suffix[1:].lower())
    _native.replace_file(target, picture.getvalue())
    return target


def count(plan: PlanReader) -> PlotCounts:
    """Count what the plot shows."""
    counts = PlotCounts.of_pack_length(plan.max_length)
    for first, stop in pack_slices(plan, 0, len(plan)):
        before = int(plan.indices_cu_len[first - 1]) if first else 0
        pieces = np.diff(np.asarray(plan.indices_cu_len[first:stop], np.int64), prepend=before)
        counts.pieces += np.bincount(np.minimum(pieces, LAST_BIN), minlength=LAST_BIN + 1)
        if plan.lengths is None:
            counts.add(np.asarray(plan.longest[first:stop], np.int64))
    if plan.lengths is not None:
        for part in piece_slices(plan, 0, len(plan) - plan.packs_repeated):
            # One piece of each sample begins at its first token.
            begins = part.start == 0
            counts.add(lengths_of(plan.lengths, part.dataset[begins], part.sample[begins]))
    return counts


def _draw(figure: Any, plan: PlanReader, counts: PlotCounts) -> None:
    grid = figure.add_gridspec(2, 2, left=0.07, right=0.97, top=0.83, bottom=0.09, hspace=0.42, wspace=0.2)
    stats = plan_stats(plan.metadata)
    figure.text(
        0.07,
        0.945,
        f"{len(plan):,} packs of {'' if plan.mode == 'hard' else 'up to '}{plan.max_length:,} tokens",
        fontsize=20,
        color=INK,
        weight="bold",
    )
    line = (
        f"{stats['samples']:,} samples   ·   {short(stats['tokens'])} tokens   ·   {plan.mode} packing   ·   "
        f"seed {'none' if plan.seed is None else plan.seed}   ·   {plan.fingerprint[:12]}"
    )
    figure.text(0.07, 0.905, line, fontsize=11, color=SOFT)
    _draw_lengths(figure.add_subplot(grid[0, 0]), plan, counts, stats)
    _draw_pieces(figure.add_subplot(grid[0, 1]), stats, counts)
    _draw_samples(figure.add_subplot(grid[1, 0]), plan, stats)
    _draw_tokens(figure.add_subplot(grid[1, 1]), plan, stats, counts)


def _draw_lengths(axes: Any, plan: PlanReader, counts: PlotCounts, stats: dict[str, Any]) -> None:
    title, counted = "Longest piece of each pack", "packs"
    if plan.has_lengths:
        title, counted = "Length of samples", "samples"
    cut = ""
    if counts.longer:
        cut = f", cut at the pack length: {counts.longer:,} are longer, up to {counts.longest:,}"
    frame(axes, title, f"tokens{cut}", counted)
    starts = np.arange(0, len(counts.lengths), BINS_A_BAR)
    bars = np.add.reduceat(counts.lengths, starts)
    edges = np.append(counts.edges[starts], counts.edges[-1])
    if not bars.any() and not counts.longer:
        _nothing(axes)
        return
    low = int(np.flatnonzero(bars)[0]) if bars.any() else len(bars) - 1
    axes.stairs(bars[low:], edges[low:], fill=True, color=BLUE)
    entries = [(counted, BLUE)]
    if counts.longer:
        # Above the last bar, so that no bar is beyond the pack length.
        axes.stairs([bars[-1] + counts.longer], edges[-2:], baseline=bars[-1], fill=True, color=ORANGE)
        entries.append((f"longer than a pack ({counts.longer:,})", ORANGE))
    axes.set_xscale("log", base=4 if len(bars) - low > 6 * BINS_A_DOUBLING // BINS_A_BAR else 2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    _headroom(axes)
    axes.set_xlim(edges[low] / 1.1, edges[-1] * 1.1)
    _mark(axes, plan.max_length, f"pack length {plan.max_length:,} ", "right")
    legend(axes, entries, "upper left")
    if stats["samples_empty"]:
        _note(axes, f"and {format_count(stats['samples_empty'], 'empty sample')}")


def _draw_pieces(axes: Any, stats: dict[str, Any], counts: PlotCounts) -> None:
    if not counts.pieces.any():
        frame(axes, "Pieces a pack", "pieces", "packs")
        _nothing(axes)
        return
    mean, most = stats["pieces_per_pack"], stats["max_pieces_per_pack"]
    # The last pack in a thousand would stretch the axis until the others are one bar.
    reached = np.cumsum(counts.pieces) / counts.pieces.sum()
    end = int(np.searchsorted(reached, 0.999)) + 1
    width = max(1, math.ceil(end / 60))
    edges = np.arange(0, end + width, width) + (1 if width == 1 else 0)
    sums = np.array([counts.pieces[low : low + width].sum() for low in edges[:-1]])
    beyond = int(counts.pieces[edges[-1] :].sum())
    cut = ""
    if beyond:
        have = "pack has" if beyond == 1 else "packs have"
        cut = f", cut at {edges[-1] - 1:,}: {beyond:,} {have} more, up to {most:,}"
    frame(axes, "Pieces a pack", f"pieces{cut}", "packs")
    axes.stairs(sums, edges - 0.5, fill=True, color=BLUE)
    _headroom(axes)
    _mark(axes, mean, f" mean {mean:,.1f}", "left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _note(axes, f"most: {format_count(most, 'piece')}")


def _draw_samples(axes: Any, plan: PlanReader, stats: dict[str, Any]) -> None:
    frame(axes, "Samples", "", "samples")
    bars = [("whole", stats["samples"] - stats["samples_cut"], BLUE)]
    note = "no sample is longer than a pack"
    if plan.mode == "hard":
        bars.append(("cut", stats["samples_cut"], ORANGE))
        note = f"{format_share(stats['samples_cut'] / max(1, stats['samples']))} of the samples are cut"
    if plan.overlong not in (None, "error"):
        done = {"split": "split", "truncate": "truncated"}.get(plan.overlong, "dropped")
        bars.append((done, stats["samples_overlong"], ORANGE))
        note = (
            f"{stats['samples_overlong']:,} are {done}, and {short(stats['tokens_dropped'])} tokens left out"
        )
    bars.append(("empty", stats["samples_empty"], PALE))
    names, heights, colors = zip(*bars, strict=True)
    total = sum(heights)
    if not total:
        _nothing(axes)
        return
    drawn = axes.bar(names, heights, color=colors, width=0.7)
    labels = [format_share(height / total) for height in heights]
    axes.bar_label(drawn, labels, color=INK, fontsize=9.5, padding=3)
    axes.margins(y=0.15)
    _note(axes, note)


def _draw_tokens(axes: Any, plan: PlanReader, stats: dict[str, Any], counts: PlotCounts) -> None:
    frame(axes, "Where the tokens go", "", "")
    rows = [
        (
            "packed",
            [
                (stats["tokens_packed"], "tokens", BLUE),
                (stats["tokens_repeated"], "repeated", SOFT),
                (stats["padding"], "padding", PALE),
                (stats["tokens_dropped"], "left out", ORANGE),
            ],
        )
    ]
    if plan.has_lengths:
        kept = int(counts.tokens.sum()) + counts.longer * plan.max_length
        rows.append(
            (
                "padded",
                [
                    (kept, "tokens", BLUE),
                    (counts.padding(), "padding", PALE),
                    (counts.cut_off, "left out", ORANGE),
                ],
            )
        )
    widest = max(1.0, *(sum(tokens for tokens, _, _ in parts) for _, parts in rows))
    for number, (name, parts) in enumerate(rows):
        total = sum(tokens for tokens, _, _ in parts)
        (kept, _, _), *lost = parts
        said = [f"{name}: {short(kept)} tokens"]
        losses = [(tokens, word) for tokens, word, _ in lost if tokens]
        for tokens, word in losses:
            # The shares of three would not fit into the plot.
            share = f" ({format_share(tokens / total)})" if len(losses) < 3 else ""
            said.append(f"{short(tokens)} {word}{share}")
        stacked_bar(axes, number, [(tokens, color) for tokens, _, color in parts], widest, ", ".join(said))
    axes.set_ylim(len(rows) - 0.35 if len(rows) > 1 else 1.0, -0.75)
    axes.set_yticks([])
    used = {word: color for _, parts in rows for tokens, word, color in parts if tokens}
    legend(axes, list(used.items()), "below")
    if plan.has_lengths:
        _below(
            axes,
            f"padded: random batches of {PADDED_BATCH}, each to its longest, cut off at a pack",
        )


def frame(axes: Any, title: str, below: str, beside: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, color=INK, weight="bold", pad=10)
    axes.set_xlabel(below, color=SOFT, fontsize=10)
    axes.set_ylabel(beside, color=SOFT, fontsize=10)
    axes.tick_params(colors=SOFT, labelsize=9, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.yaxis.set_major_formatter(lambda value, _: short(value))


def stacked_bar(axes: Any, row: int, parts: Sequence[tuple[float, str]], widest: float, text: str) -> None:
    """Draw tokens and their colors as one bar in a `row`, relative to the widest, with a text above it."""
    left = 0.0
    for tokens, color in parts:
        axes.barh(row, tokens / widest, left=left / widest, color=color, height=0.42)
        left += tokens
    axes.text(0, row - 0.28, text, color=INK, fontsize=9.5, va="bottom")
    axes.grid(False)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _mark(axes: Any, place: float, text: str, side: str) -> None:
    """Draw a vertical line, with a text at its top whose `side` touches it."""
    axes.axvline(place, color=ORANGE, linewidth=1.5)
    label: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    offset = (-3 if side == "right" else 3, -4)
    axes.annotate(text, (place, 1), xytext=offset, ha=side, va="top", color=ORANGE, fontsize=9.5, **label)


def _headroom(axes: Any) -> None:
    # So that the label at the top of a line never lies on a bar.
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)


def _note(axes: Any, text: str) -> None:
    axes.text(1, 1.045, text, transform=axes.transAxes, ha="right", va="bottom", color=SOFT, fontsize=9.5)


def _below(axes: Any, text: str) -> None:
    axes.text(0, -0.16, text, transform=axes.transAxes, va="top", color=SOFT, fontsize=9.5)


def legend(axes: Any, entries: Sequence[tuple[str, str]], place: str) -> None:
    """Draw what the colors mean: texts and their colors, within the axes, or "below" them."""
    from matplotlib.patches import Patch

    where: dict[str, Any] = {"loc": place}
    if place == "below":
        where = {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": 0.3, "ncols": len(entries)}
    axes.legend(
        handles=[Patch(color=color, label=text) for text, color in entries],
        frameon=False,
        fontsize=9.5,
        labelcolor=SOFT,
        handlelength=1,
        handleheight=1,
        **where,
    )


def _nothing(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center", color=SOFT, fontsize=11)


def short(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}" if number != int(number) else f"{int(number)}"
