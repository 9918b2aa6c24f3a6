"""Writes the tables of benches/RESULTS.md.

Each part has a section between two markers. Writing a part leaves the rest of the file unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


def markers(part: str) -> tuple[str, str]:
    """Return the lines before and after the section of a part."""
    return (
        f"<!-- {part}, side by side in Python: begin; written by benches/peers/run.py -->",
        f"<!-- {part}, side by side in Python: end -->",
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. `met` is None if there is no target."""

    case: str
    ours: str
    peer: str
    peers: str
    figure: str
    target: str = "–"
    met: bool | None = None


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


def times_faster(
    case: str, ours: float, peer: str, peers: float, *, samples: int, at_least: float | None = None
) -> Row:
    """Return a row that compares two times in seconds. `at_least` is the target ratio."""
    ratio = peers / ours
    return Row(
        case=case,
        ours=f"{duration(ours)} ({ours / samples * 1e9:.3g} ns)",
        peer=peer,
        peers=duration(peers),
        figure=f"{ratio:.3g}×",
        target="–" if at_least is None else f"≥ {at_least:g}×",
        met=None if at_least is None else ratio >= at_least,
    )


COLUMNS = ("case", "tundish", "against", "its figure", "figure", "target", "met")
MET = {None: "–", True: "yes", False: "**no**"}


def _cells(row: Row) -> list[str]:
    return [row.case, row.ours, row.peer, row.peers, row.figure, row.target, MET[row.met]]


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Format a table without its empty columns."""
    filled = [column for column in range(len(header)) if any(row[column] != "–" for row in rows)]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line[column] for column in filled) + " |" for line in lines)


def render(part: str, sections: list[Section], machine: list[tuple[str, str]], rounds: str) -> str:
    """Format the section of a part."""
    judged = [
        [section.title, *_cells(row)] for section in sections for row in section.rows if row.met is not None
    ]
    parts = [
        f"# {part.capitalize()}, side by side in Python",
        "Written by `make bench` from one run; not edited by hand. " + rounds,
        _table(["machine", ""], [list(pair) for pair in machine]),
    ]
    if judged:
        parts += ["## Targets", _table(["measure", *COLUMNS], judged)]
    for section in sections:
        parts += [f"## {section.title}", section.note]
        if section.rows:
            parts.append(_table(list(COLUMNS), [_cells(row) for row in section.rows]))
    return "\n\n".join(parts) + "\n"


def write(path: Path, part: str, rendered: str) -> None:
    """Replace the section of `part` in `path` with `rendered`. Creates the file if it does not exist."""
    begin, end = markers(part)
    earlier = path.read_text() if path.exists() else ""
    before, marker, rest = earlier.partition(begin)
    if not marker and before:
        before = before.rstrip("\n") + "\n\n"
    after = rest.partition(end)[2]
    path.write_text(f"{before}{begin}\n{rendered}{end}\n{after.removeprefix(chr(10))}")
