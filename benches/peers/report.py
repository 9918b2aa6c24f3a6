"""Writes the tables of benches/RESULTS.md.

The file begins with one table of the rows that users feel, taken from the sections below it. Each part has a section
between two markers. Writing a part leaves the sections of the other parts unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from measure import Seconds


class Felt(NamedTuple):
    """A row that users feel: patterns of its section's title, its case and its peer."""

    title: str
    case: str
    peer: str


# The first table, of at most 25 rows.
FELT = (
    Felt("Hard plan in memory, order given", "text, 10⁷", "vectorised numpy"),
    Felt("Hard plan in memory, order given", "text, 10⁷", "megatron-core .*"),
    Felt("Best fit, whole plan", "text, 10⁶, .*", "TRL .*"),
    Felt("Best fit, whole plan", "text, 10⁶, .*", "lightbinpack .*"),
    Felt("Best fit, whole plan", "text, 10⁶, .*", "seqpacker .*"),
    Felt("First batch of a packed Hugging Face dataset", "chat, .*", "TRL .*"),
    Felt("Packs of a Hugging Face stream", "text, .*", "reading the stream alone"),
    Felt("Balanced parts of one step", "chat, 10⁴, 64 parts", "verl .*"),
    Felt("2.2 GB in 110 tensors, one rank", "stall, tundish save_hf", r"Tensor\.copy_"),
    Felt("2.2 GB in 110 tensors, one rank", "stall, tundish save_hf, lazy", "DCP async_save, process.*"),
    Felt("2.2 GB in 110 tensors, one rank", "durable, tundish save_hf", "bare direct writes"),
    Felt(
        "2.2 GB in 110 tensors, one rank, beside training",
        "time lost, matrix products",
        ".*, the best of them",
    ),
    Felt("2.2 GB in 110 tensors, two ranks .* a half each", "stall, tundish save_dcp", r"Tensor\.copy_"),
    Felt("2.2 GB in 110 tensors, two ranks .* a half each", "load_dcp, from the disk", "dcp.load .*"),
    Felt("An empty task, 2 workers", "unchunked", "two-queue pool"),
    Felt("Arrays as results, 2 workers", "16 MiB", "two-queue pool"),
    Felt("1024.0 MiB on 8 ranks of a node", r"time, td\.shm\.node_shared", "one copy .*"),
    Felt("Ranks of one node, through shared memory", "text, 4 ranks", "one isend per tensor"),
    Felt("Ranks of one node, through shared memory", "VLM, 4 ranks", "one isend per tensor"),
    Felt("Ranks of one node, beside Accelerate .*", "VLM, 4 ranks", "Accelerate's .*"),
    Felt("Over the network: gloo .*", "VLM, 4 ranks", "one isend per tensor"),
    Felt("Fetching over sockets, beside AReaL and pyzmq", "256 MB", "pyzmq"),
    Felt("Fetching over sockets, beside AReaL and pyzmq", "256 × 64 KB", "AReaL's HTTP path"),
    Felt("Fetching over sockets, beside AReaL and pyzmq", "256 × 64 KB", "pyzmq"),
    Felt("Drains", ".*, by ids: a fetch meanwhile", "AReaL"),
)
_FELT_MARKERS = (
    "<!-- rows that users feel: begin; written by benches/peers/run.py -->",
    "<!-- rows that users feel: end -->",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `peer` is another library, or a limit of the machine; `spread` is that of our times."""

    case: str
    ours: str
    peer: str
    peers: str
    figure: str
    spread: str = "–"


@dataclass(kw_only=True)
class Section:
    """The figures of one measure."""

    title: str
    note: str
    rows: list[Row] = field(default_factory=list)


def duration(seconds: float) -> str:
    """Format seconds with a readable unit."""
    for limit, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def rate(per_second: float) -> str:
    """Format a rate with a readable unit."""
    for least, scale, unit in ((1e6, 1e-6, "M/s"), (1e3, 1e-3, "k/s")):
        if per_second >= least:
            return f"{per_second * scale:.3g} {unit}"
    return f"{per_second:.3g} /s"


def size(count_of_bytes: float) -> str:
    """Format bytes as MiB."""
    return f"{count_of_bytes / 2**20:.1f} MiB"


def count(samples: int) -> str:
    """Format a power of ten with an exponent."""
    digits = str(samples)
    if digits.strip("0") != "1":
        return digits
    return "10" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(len(digits) - 1))


def compared(
    case: str,
    ours: float,
    peer: str,
    peers: float,
    *,
    samples: int | None = None,
    show: Callable[[float], str] = duration,
) -> Row:
    """Return a row with how many times as long as ours a peer takes; with `samples`, our nanoseconds for each too."""
    return Row(
        case=case,
        ours=show(ours) if samples is None else f"{show(ours)} ({ours / samples * 1e9:.3g} ns)",
        peer=peer,
        peers=show(peers),
        figure=f"{peers / ours:.3g}×",
        spread=f"{ours.spread:.0%}" if isinstance(ours, Seconds) else "–",
    )


COLUMNS = ("case", "tundish", "against", "its figure", "figure", "spread")


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Format a table without its empty columns."""
    filled = [column for column in range(len(header)) if any(row[column] != "–" for row in rows)]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line[column] for column in filled) + " |" for line in lines)


def render(part: str, sections: list[Section], machine: list[tuple[str, str]], rounds: str) -> str:
    """Format the section of a part."""
    parts = [
        f"# {part.capitalize()}, side by side in Python",
        f"Written by `make bench` from one run; not edited by hand. {rounds} The spread is by how much the longest of "
        "our times is more than the shortest.",
        _table(["machine", ""], [list(pair) for pair in machine]),
    ]
    for section in sections:
        parts += [f"## {section.title}", section.note]
        if section.rows:
            cells = [[getattr(row, column.name) for column in fields(row)] for row in section.rows]
            parts.append(_table(list(COLUMNS), cells))
    return "\n\n".join(parts) + "\n"


def write(path: Path, part: str, rendered: str) -> None:
    """Replace the section of `part` in `path` with `rendered`, and the first table. Creates a file that is missing."""
    text = path.read_text() if path.exists() else ""
    text = _replaced(text, *_FELT_MARKERS, "")
    text = _replaced(text, *markers(part), rendered)
    path.write_text("\n".join([_FELT_MARKERS[0], felt(text), _FELT_MARKERS[1], "", text.lstrip("\n")]))


def markers(part: str) -> tuple[str, str]:
    """Return the lines before and after the section of a part."""
    return (
        f"<!-- {part}, side by side in Python: begin; written by benches/peers/run.py -->",
        f"<!-- {part}, side by side in Python: end -->",
    )


def _replaced(text: str, begin: str, end: str, new: str) -> str:
    """`text` with `new` between two markers, at its end where it had none; without the markers where `new` is empty."""
    before, marker, rest = text.partition(begin)
    if not marker and before:
        before = before.rstrip("\n") + "\n\n"
    after = rest.partition(end)[2].removeprefix("\n")
    return f"{before}{begin}\n{new}{end}\n{after}" if new else before + after


def felt(text: str) -> str:
    """Return the table of the rows that users feel, from the sections in `text`, and the machines they ran on."""
    found: dict[Felt, list[str]] = {}
    machines: dict[str, list[str]] = {}
    part = title = ""
    columns: list[str] = []
    for line in text.splitlines():
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ") if line.startswith("| ") else []
        if line.startswith("# "):
            part = line[2:].partition(",")[0]
        elif line.startswith("## "):
            title = line[3:]
        elif cells[:1] == ["Processor"]:
            machines.setdefault(cells[1], []).append(part)
        elif not cells:
            columns = []
        elif not columns:
            columns = cells
        elif columns[0] == "case" and len(cells) == len(columns):
            row = dict(zip(columns, cells, strict=True))
            texts = title, row["case"], row.get("against", "–")
            for one in FELT:
                if all(map(re.fullmatch, one, texts)):
                    found[one] = [title, *(row.get(column, "–") for column in COLUMNS)]
    said = "; ".join(f"{', '.join(parts)}: {processor}" for processor, parts in machines.items())
    rows = [found[one] for one in FELT if one in found]
    table = [_table(["measure", *COLUMNS], rows)] if rows else []
    return "\n\n".join(["# What users feel", f"Rows of the sections below. {said}.", *table])
