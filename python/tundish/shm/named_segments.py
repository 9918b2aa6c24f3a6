"""Lists the named segments of this user, and removes those that no process holds.

A process holds a segment by a lock that the kernel drops with the process. Files of other users and of other programs
are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tundish import _native
from tundish.errors import InvalidTypeError

__all__ = ["NamedSegment", "SweepReport", "sweep"]


@dataclass(frozen=True, kw_only=True)
class NamedSegment:
    """A named segment of this user, as `sweep` reports it."""

    name: str
    path: Path
    #: Bytes of the file: those of the array, and one page.
    size: int
    #: Id of the process that made it. Other processes may hold the segment after that has ended.
    made_by: int


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The result of a sweep."""

    #: Segments that no process holds: removed, or in a dry run only found.
    removed: tuple[NamedSegment, ...]
    #: Segments that a process holds.
    live: tuple[NamedSegment, ...]
    #: One error message for each segment that could not be examined or removed. The next sweep tries again.
    failed: tuple[str, ...]
    #: Empty files of killed checkpoint writers: removed, or in a dry run only found.
    writer_slots: tuple[Path, ...]


def sweep(dry_run: bool = False) -> SweepReport:
    """Remove what killed processes of this user left in `/dev/shm`: named segments, and files of checkpoint writers.

    A process that makes its first named segment sweeps too. Any number of processes may sweep, make and attach segments
    at the same time.

    Args:
        dry_run: whether to report only, and remove nothing.

    Returns:
        The segments that were found and those that were removed.

    Raises:
        StorageError: the folder of named segments cannot be read.
        InvalidTypeError: `dry_run` is no bool.

    Example:
        >>> import tundish as td
        >>> report = td.shm.sweep(dry_run=True)
        >>> names = [segment.name for segment in report.removed]
    """
    if not isinstance(dry_run, bool):
        raise InvalidTypeError(f"dry_run must be True or False, not {dry_run!r}")
    found = _native.sweep_segments(dry_run=dry_run)
    return SweepReport(
        removed=tuple(NamedSegment(**segment) for segment in found["dead"]),
        live=tuple(NamedSegment(**segment) for segment in found["live"]),
        failed=tuple(found["failed"]),
        writer_slots=tuple(_native.sweep_writer_slots(dry_run=dry_run)),
    )
