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
from tundish.errors import InvalidInputError, NotFoundError, missing_extra
from tundish.packing.arguments import as_path
from tundish.packing.plan_stats import PlanReader, pack_slices, plan_stats

# Counts of pieces a pack from here on are one.
LAST_BIN = 1 << 16
FORMATS = (".png", ".svg", ".pdf")
# Histograms over a wide range of lengths: a bin for 0, and bins of equal ratio, this many a doubling.
BINS_A_DOUBLING = 4
EDGES = np.concatenate([[0.0], 2.0 ** (np.arange(64 * BINS_A_DOUBLING) / BINS_A_DOUBLING)])

INK, SOFT, GRID = "#22303c", "#6b7a88", "#e3e8ec"
BLUE, ORANGE, PALE = "#2f6f9f", "#d9772b", "#b9cfdf"


@dataclass
class PlotCounts:
    """The counts that the plot shows.

    Attributes:
        lengths: Samples by length, in bins of equal ratio (bin 0: empty samples). Of a plan that splits or truncates
            samples, pieces by their tokens. Packs by their longest piece if neither is known.
        pieces: Packs by their number of pieces.
        tokens: Tokens of these samples.
        padded: Tokens if each sample were padded to whole packs instead.
    """

    lengths: np.ndarray = field(default_factory=lambda: np.zeros(len(EDGES) - 1, np.int64))
    pieces: np.ndarray = field(default_factory=lambda: np.zeros(LAST_BIN + 1, np.int64))
    tokens: int = 0
    padded: int = 0


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
    counts = PlotCounts()
    for begin, end in pack_slices(plan, 0, len(plan)):
        _count_slice(plan, begin, end, counts)
    return counts


def _count_slice(plan: PlanReader, first: int, stop: int, counts: PlotCounts) -> None:
    before = int(plan.indices_cu_len[first - 1]) if first else 0
    pieces = np.diff(np.asarray(plan.indices_cu_len[first:stop], np.int64), prepend=before)
    counts.pieces += np.bincount(np.minimum(pieces, LAST_BIN), minlength=LAST_BIN + 1)
    if not _has_sizes(plan):
        counts.lengths += np.histogram(plan.longest[first:stop], EDGES)[0]
        return
    batch = plan.lookup(np.arange(first, stop, dtype=np.int64))
    lengths = batch.stop - batch.start
    if plan.mode == "hard":
        # The last piece of a sample stops at the sample's length. The next pack goes on with any other one.
        goes_on = np.asarray(plan.start_offset[first + 1 : stop + 1]) > 0
        lengths = np.delete(batch.stop, batch.piece_cu[1 : len(goes_on) + 1][goes_on] - 1)
    counts.lengths += np.histogram(lengths, EDGES)[0]
    counts.tokens += int(lengths.sum())
    counts.padded += int((-(-lengths // plan.max_length)).sum()) * plan.max_length


def _has_sizes(plan: PlanReader) -> bool:
    """Whether the tokens of every piece are known."""
    return plan.has_lengths or plan.piece_stop is not None


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
    _draw_lengths(figure.add_subplot(grid[0, 0]), plan, counts)
    _draw_pieces(figure.add_subplot(grid[0, 1]), stats, counts)
    _draw_samples(figure.add_subplot(grid[1, 0]), plan, stats)
    _draw_tokens(figure.add_subplot(grid[1, 1]), plan, stats, counts)


def _draw_lengths(axes: Any, plan: PlanReader, counts: PlotCounts) -> None:
    title, counted = "Longest piece of each pack", "packs"
    if _has_sizes(plan):
        counted = "samples" if plan.piece_stop is None else "pieces"
        title = f"Length of {counted}"
    frame(axes, title, "tokens", counted)
    filled = np.flatnonzero(counts.lengths[1:])
    if not len(filled):
        _nothing(axes)
        return
    low, high = int(filled[0]), int(filled[-1]) + 1
    edges = EDGES[1 + low : 2 + high]
    axes.stairs(counts.lengths[1 + low : 1 + high], edges, fill=True, color=BLUE)
    axes.set_xscale("log", base=4 if high - low > 6 * BINS_A_DOUBLING else 2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()
    _headroom(axes)
    axes.set_xlim(edges[0] / 1.2, max(edges[-1], plan.max_length) * 1.2)
    _mark(axes, plan.max_length, f"pack length {plan.max_length:,} ", "right")
    if counts.lengths[0]:
        _note(axes, f"and {counts.lengths[0]:,} empty samples")


def _draw_pieces(axes: Any, stats: dict[str, Any], counts: PlotCounts) -> None:
    frame(axes, "Pieces a pack", "pieces", "packs")
    if not counts.pieces.any():
        _nothing(axes)
        return
    mean = stats["pieces_per_pack"]
    # The last pack in a thousand would stretch the axis until the others are one bar.
    reached = np.cumsum(counts.pieces) / counts.pieces.sum()
    end = int(np.searchsorted(reached, 0.999)) + 1
    width = max(1, math.ceil(end / 60))
    edges = np.arange(0, end + width, width) + (1 if width == 1 else 0)
    sums = np.array([counts.pieces[low : low + width].sum() for low in edges[:-1]])
    axes.stairs(sums, edges - 0.5, fill=True, color=BLUE)
    _headroom(axes)
    _mark(axes, mean, f" mean {mean:,.1f}", "left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _note(axes, f"most: {stats['max_pieces_per_pack']:,} pieces")


def _draw_samples(axes: Any, plan: PlanReader, stats: dict[str, Any]) -> None:
    frame(axes, "Samples", "", "samples")
    bars = [("whole", stats["samples"] - stats["samples_cut"], BLUE)]
    note = "no sample is longer than a pack"
    if plan.mode == "hard":
        bars.append(("cut", stats["samples_cut"], ORANGE))
        note = f"{percent(stats['samples_cut'] / max(1, stats['samples']))} of the samples are cut"
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
    labels = [percent(height / total) for height in heights]
    axes.bar_label(drawn, labels, color=INK, fontsize=9.5, padding=3)
    axes.margins(y=0.15)
    _note(axes, note)


def _draw_tokens(axes: Any, plan: PlanReader, stats: dict[str, Any], counts: PlotCounts) -> None:
    frame(axes, "Where the tokens go", "", "")
    packed, dropped, padding = stats["tokens_packed"], stats["tokens_dropped"], stats["padding"]
    losses: list[tuple[float, str, str]] = []
    if stats["tokens_repeated"]:
        losses.append((stats["tokens_repeated"], SOFT, "repeated"))
    if dropped or not padding:
        losses.append((dropped, ORANGE, "dropped"))
    if padding:
        losses.append((padding, PALE, "padding"))
    rows: list[tuple[str, float, list[tuple[float, str, str]]]] = [("packed", packed, losses)]
    if counts.padded:
        kept = stats["tokens"] if plan.mode == "hard" else packed
        rows.append(("padded", kept, [((counts.padded / counts.tokens - 1) * kept, PALE, "padding")]))
    widest = max(1.0, *(kept + sum(lost for lost, _, _ in losses) for _, kept, losses in rows))
    for row, (name, kept, losses) in enumerate(rows):
        total = kept + sum(lost for lost, _, _ in losses)
        said = [f"{short(lost)} {word}" for lost, _, word in losses]
        # The shares of three would not fit into the plot.
        if len(losses) < 3:
            shares = [percent(lost / total if total else 0.0) for lost, _, _ in losses]
            said = [f"{words} ({share})" for words, share in zip(said, shares, strict=True)]
        text = f"{name}: {short(kept)}{' tokens' if len(said) == 1 else ''}, {', '.join(said)}"
        stacked_bar(axes, row, [(kept, BLUE), *((lost, color) for lost, color, _ in losses)], widest, text)
    axes.set_ylim(len(rows) - 0.35 if len(rows) > 1 else 1.0, -0.75)
    axes.set_yticks([])
    if counts.padded:
        each = "sample" if plan.piece_stop is None else "piece"
        _below(axes, f"padded: each {each} filled up to a whole number of packs")


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
    axes.text(0, row - 0.28, text, color=INK, fontsize=10.5, va="bottom")
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
    axes.text(0, -0.09, text, transform=axes.transAxes, va="top", color=SOFT, fontsize=9.5)


def _nothing(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "nothing", transform=axes.transAxes, ha="center", color=SOFT, fontsize=11)


def percent(share: float) -> str:
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{share * 100:.1f} %"


def short(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}" if number != int(number) else f"{int(number)}"
