"""Reports the shared memory of this process, and limits the segments that it keeps for its next arrays."""

from __future__ import annotations

from typing import TypedDict

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, shown

__all__ = ["set_cache_limit", "stats"]


class SharedMemoryStats(TypedDict):
    """Bytes of the segments of this process."""

    mapped: int
    """In use: its own, and those of other processes that it is attached to."""
    cached: int
    """Its own that were given back, kept for the next ones."""
    escaped: int
    """Its own that were given back while a view of them lived in some process, kept until that ends."""
    peak: int
    """The most that its own ever were together."""


def stats() -> SharedMemoryStats:
    """Return the bytes of shared memory of this process: `mapped`, `cached`, `escaped`, `peak`.

    A segment that was given back with a view alive elsewhere is kept only within the cache's limit. Beyond that it
    belongs to the processes that have the views, and is counted there.
    """
    counted = _native.shared_stats()
    return SharedMemoryStats(
        mapped=counted["mapped"], cached=counted["cached"], escaped=counted["escaped"], peak=counted["peak"]
    )


def set_cache_limit(limit_bytes: int) -> None:
    """Keep up to `limit_bytes` of this process's segments for its next arrays.

    The default is a sixteenth of the memory that the process can have. Fresh pages cost many times a copy into used
    ones.

    Args:
        limit_bytes: 0 keeps none.

    Raises:
        InvalidTypeError, InvalidInputError: it is no number of bytes.
    """
    if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int):
        raise InvalidTypeError(f"limit_bytes is {limit_bytes!r}: give a number of bytes")
    if not 0 <= limit_bytes < 1 << 62:
        raise InvalidInputError(f"limit_bytes is {shown(limit_bytes)}: give a number of bytes from 0 on")
    _native.set_shared_cache_limit(limit_bytes)
