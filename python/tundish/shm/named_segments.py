"""Lists the named segments of this user, and removes those that no process has any more.

A segment that a living process holds or maps, a file of another user, and a file that is no segment of this library are
left alone. Locks that the kernel drops with a process tell whether a segment is held, never process ids, which are used
again.
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
    """A named segment of this user."""

    name: str
    path: Path
    #: Bytes of the file: those of the array, and a page.
    size: int
    #: `"held"`: a process has it open through this library. `"mapped"`: none does, but the processes in `mapped_by` map
    #: it. `"dead"`: no process has it.
    state: Literal["held", "mapped", "dead"]
    mapped_by: tuple[int, ...]
    #: The process that made it, by its id then.
    made_by: int
    #: Whether that process still runs, as far as this one can see. Others may hold the segment when it does not.
    maker_lives: bool


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The result of a sweep."""

    #: Dead segments that were removed; in a dry run, that would be.
    removed: tuple[NamedSegment, ...]
    #: Segments that a process holds or maps.
    live: tuple[NamedSegment, ...]
    #: Why a segment could not be looked at or removed, a sentence each. The next sweep tries again.
    failed: tuple[str, ...]
    #: Empty files by which checkpoint writers take turns, of killed writers; removed as those in `removed`.
    writer_slots: tuple[Path, ...]


def sweep(dry_run: bool = False) -> SweepReport:
    """Remove the named segments that killed processes of this user left, and the marks of killed checkpoint writers.

    The first named segment of a process does this too. Any number of processes may sweep at once, and make and attach
    segments meanwhile.

    Args:
        dry_run: only look.

    Raises:
        StorageError: the folder of named segments cannot be read.
        InvalidTypeError: `dry_run` is no bool.
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
