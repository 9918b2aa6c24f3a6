"""How plans, mixes and packs are shown: as tables in notebooks, and as text on standard output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidTypeError, format_count, format_share, format_type
from tundish.packing.inspection.plan_stats import MixReader, PlanReader, mix_shares, plan_stats

# The label of tokens that are not learned.
_IGNORED_LABEL = -100
# What a preview shows of a part: characters of its text, or token ids.
_SHOWN_CHARACTERS, _SHOWN_TOKENS = 160, 16
# Parts of a piece that a preview shows.
_SHOWN_PARTS = 12


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as HTML. All texts are escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = [row(head, "th")] if head else []
    lines += [row(cells, "td") for cells in rows]
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def plan_as_html(plan: PlanReader) -> str:
    """The counts of a plan as a table."""
    stats = plan_stats(plan.metadata)
    rows = [
        ("packs", f"{len(plan):,} of at most {plan.max_length:,} tokens"),
        ("mode", plan.mode),
        ("full", format_share(stats["fill"])),
        ("samples", f"{stats['samples']:,} in {format_count(len(plan.num_samples), 'dataset')}"),
        *(
            (name.replace("_", " "), f"{stats[name]:,}")
            for name in ("tokens_packed", "tokens_dropped", "padding")
        ),
        ("samples cut", f"{stats['samples_cut']:,}"),
        ("fingerprint", plan.fingerprint),
    ]
    if plan.path is not None:
        rows.append(("folder", str(plan.path)))
    return html_table("PackPlan", (), rows)


def mix_as_html(mix: MixReader) -> str:
    """The plans of a mix and their shares as a table."""
    caption = f"PackMix of {format_count(len(mix), 'pack')}"
    if start := mix.since:
        caption += f", with these weights from pack {start:,} on"
    rows = [
        (name, format_share(share), f"{len(plan):,}")
        for name, share, plan in zip(mix.names, mix_shares(mix.weights), mix.plans, strict=True)
    ]
    return html_table(caption, ("plan", "share asked for", "packs"), rows)


# ---- Previews ----


class PieceText(NamedTuple):
    """A piece as a preview shows it: tokens `start` … `stop` - 1 of a sample, whose name is `sample`.

    `tokens` and `is_learned` are (tokens,); `padding` is what `align` adds to it.
    """

    sample: str
    start: int
    stop: int
    tokens: NDArray[np.int64]
    is_learned: NDArray[np.bool_]
    padding: int


# As `Pack` and its pieces: the dataset, and of each piece the sample, the first token, and one past the last, if known.
_Pack = tuple[int, Sequence[tuple[int, int, int | None]]]


def print_packs(packs: Iterable[_Pack], *, several_datasets: bool) -> None:
    """Print which tokens of which samples are in each pack; the packs count from 0."""
    for number, (dataset_id, pieces) in enumerate(packs):
        known = [stop - start for _, start, stop in pieces if stop is not None]
        total = f"{format_count(sum(known), 'token')} in " if len(known) == len(pieces) else ""
        dataset = f" of dataset {dataset_id}" if several_datasets else ""
        _print(f"pack {number}: {total}{format_count(len(pieces), 'piece')}")
        for place, (sample, start, stop) in enumerate(pieces):
            end = "" if stop is None else stop
            _print(f"  piece {place}: tokens {start}:{end} of sample {sample}{dataset}")


def print_item(title: str, pieces: Sequence[PieceText], tokenizer: Any) -> None:
    """Print a pack: its pieces, and the text of each, in parts that are learned or masked.

    Args:
        title: Names the pack.
        pieces: The pieces.
        tokenizer: Has `decode`; None prints token ids.

    Raises:
        InvalidTypeError: The tokenizer has no `decode`.
        Errors of the tokenizer.
    """
    show: Callable[[list[int]], str] = _token_ids
    if tokenizer is not None:
        decode = getattr(tokenizer, "decode", None)
        if not callable(decode):
            raise InvalidTypeError(
                f"tokenizer is {format_type(tokenizer)}: give one whose decode makes text of a list of token ids"
            )
        show = _decoder(decode)
    tokens = sum(len(piece.tokens) + piece.padding for piece in pieces)
    _print(f"{title}: {format_count(tokens, 'token')} in {format_count(len(pieces), 'piece')}")
    for number, piece in enumerate(pieces):
        padding = f", and {format_count(piece.padding, 'token')} of padding" if piece.padding else ""
        _print(
            f"  piece {number}: tokens {piece.start}:{piece.stop} of {piece.sample}, "
            f"{np.count_nonzero(piece.is_learned)} learned{padding}"
        )
        bounds = [0, *(np.flatnonzero(np.diff(piece.is_learned)) + 1).tolist(), len(piece.tokens)]
        for first, last in pairwise(bounds[: _SHOWN_PARTS + 1]):
            word = "learned" if piece.is_learned[first] else "masked"
            _print(f"    {word:<8}{show(piece.tokens[first:last].tolist())}")
        if (more := len(bounds) - 1 - _SHOWN_PARTS) > 0:
            _print(f"    … {format_count(more, 'more part')}")


def _token_ids(tokens: list[int]) -> str:
    shown = " ".join(map(str, tokens[:_SHOWN_TOKENS]))
    more = len(tokens) - _SHOWN_TOKENS
    return f"{shown} … {more} more" if more > 0 else shown


def _decoder(decode: Callable[[list[int]], Any]) -> Callable[[list[int]], str]:
    def show(tokens: list[int]) -> str:
        # Line ends and control characters would spoil the preview, and a terminal.
        text = repr(str(decode(tokens)))
        half = _SHOWN_CHARACTERS // 2
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"

    return show


def _print(line: str) -> None:
    print(line)  # noqa: T201 (what a preview is for)
