"""Named segments of this user: which there are, and the removing of those that nobody has any more.

What always holds: what a living process holds or maps, what another user made, and what is no segment of this library
is left alone. Whether a segment is held is told by locks that the kernel drops with a process, never by process ids,
which are used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tundish import _native
from tundish.errors import InvalidTypeError

__all__ = ["NamedSegment", "SweepReport", "sweep"]


@dataclass(frozen=True, kw_only=True)
class NamedSegment:
    """A named segment of this user, as it was when it was looked at."""

    name: str
    path: Path
    #: Bytes of the file: the array's, and a page.
    size: int
    #: `"held"`: a process has it open through this library. `"mapped"`: none does, but the processes in `mapped_by` map
    #: it. `"dead"`: nobody has it.
    state: Literal["held", "mapped", "dead"]
    mapped_by: tuple[int, ...]
    #: The process that made it, by its id then.
    made_by: int
    #: Whether that process still runs, as far as can be seen from here; others may hold the segment when it does not.
    maker_lives: bool


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """What a sweep found."""

    #: Dead ones that were removed; in a dry run, that would have been.
    removed: tuple[NamedSegment, ...]
    #: Those that a process holds or maps.
    live: tuple[NamedSegment, ...]
    #: What could not be looked at or removed, a sentence each. The next sweep tries again.
    failed: tuple[str, ...]
    #: Empty files by which writers of checkpoints take turns, of killed ones; removed as those in `removed`.
    writer_slots: tuple[Path, ...]


def sweep(dry_run: bool = False) -> SweepReport:
    """Remove the named segments that killed processes of this user left, and the marks of killed checkpoint writers.

    The first named segment that a process makes does this too, and the opening of a checkpoint root for its marks.
    `dry_run` only looks. Any number of processes may sweep at once, and make and attach segments meanwhile.

    Raises `StorageError` where the folder of named segments cannot be read, `InvalidTypeError`.
    """
    if not isinstance(dry_run, bool):
        raise InvalidTypeError(f"dry_run must be True or False, not {dry_run!r}")
    found = _native.sweep_segments(dry_run=dry_run)
    return SweepReport(
        removed=tuple(map(_segment, found["dead"])),
        live=tuple(map(_segment, found["live"])),
        failed=tuple(found["failed"]),
        writer_slots=tuple(_native.sweep_writer_slots(dry_run=dry_run)),
    )


def _segment(entry: _native.NamedSegment) -> NamedSegment:
    return NamedSegment(
        name=entry["name"],
        path=entry["path"],
        size=entry["size"],
        state=entry["state"],
        mapped_by=tuple(entry["mapped_by"]),
        made_by=entry["made_by"],
        maker_lives=entry["maker_lives"],
    )
