"""The shared memory of this process and user: its counts, its cache limit, and the sweep of what killed processes left.

A process holds a named segment by a lock that the kernel drops with the process. Files of other users and of other
programs are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, format_integer


def stats() -> dict[str, int]:
    """Return the shared memory that arrays of this process take.

    Returns:
        A flat record. `mapped_bytes`: arrays in use, made here or attached to. `cached_bytes`: freed arrays, whose
        memory is kept for the next ones. `escaped_bytes`: closed arrays that a process still reads through a view.
        `peak_bytes`: the most that all three ever took together.

    Example:
        >>> import numpy as np
        >>> import tundish as td
        >>> with td.shm.SharedArray.from_array(np.zeros(1000)):
        ...     td.shm.stats()["mapped_bytes"] >= 8000
        True
    """
    return _native.shared_stats()


def set_cache_limit(limit_bytes: int) -> None:
    """Limit the memory of freed arrays that this process keeps for its next arrays.

    The default is a sixteenth of the memory that the process can have. Writing to fresh pages takes many times as long
    as to used ones.

    Args:
        limit_bytes: bytes to keep at most; 0 keeps none.

    Raises:
        InvalidTypeError: `limit_bytes` is no integer.
        InvalidInputError: `limit_bytes` is negative or larger than any memory.

    Example:
        >>> import tundish as td
        >>> td.shm.set_cache_limit(1 << 30)
    """
    if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int):
        raise InvalidTypeError(f"limit_bytes is {limit_bytes!r}: give a number of bytes")
    if not 0 <= limit_bytes < 1 << 62:
        raise InvalidInputError(
            f"limit_bytes is {format_integer(limit_bytes)}: give a number of bytes from 0 on"
        )
    _native.set_shared_cache_limit(limit_bytes)


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


def sweep(dry_run: bool = False) -> SweepReport:
    """Remove what killed processes of this user left in `/dev/shm`: named segments.

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
    )
