"""Lists the named segments of this user, and removes those that no process has any more.

A segment that a living process holds, a file of another user, and a file that is no segment of this library are left
alone. A lock that the kernel drops with its process tells whether a segment is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    #: Id of the process that made it. Others may hold the segment when it has ended.
    made_by: int


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The result of a sweep."""

    #: Dead segments that were removed; in a dry run, that would be.
    removed: tuple[NamedSegment, ...]
    #: Segments that a process holds.
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
        removed=tuple(NamedSegment(**one) for one in found["dead"]),
        live=tuple(NamedSegment(**one) for one in found["live"]),
        failed=tuple(found["failed"]),
        writer_slots=tuple(_native.sweep_writer_slots(dry_run=dry_run)),
    )
