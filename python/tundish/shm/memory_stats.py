"""Reports the shared memory of this process, and limits the segments that it keeps for its next arrays."""

from __future__ import annotations

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, format_integer

__all__ = ["set_cache_limit", "stats"]


def stats() -> dict[str, int]:
    """Return the bytes of shared memory of this process.

    Returns:
        `mapped`: arrays in use, its own and those of other processes that it is attached to. `cached`: its own segments
        without a user, kept for its next arrays. `escaped`: its own segments that were given back while a process still
        has a view of them. `peak`: the most bytes that its own segments ever had together.
    """
    return _native.shared_stats()


def set_cache_limit(limit_bytes: int) -> None:
    """Keep up to `limit_bytes` of this process's segments for its next arrays.

    The default is a sixteenth of the memory that the process can have. Fresh pages cost many times a copy into used
    ones.

    Args:
        limit_bytes: bytes to keep; 0 keeps none.

    Raises:
        InvalidTypeError: `limit_bytes` is no integer.
        InvalidInputError: `limit_bytes` is negative or larger than any memory.
    """
    if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int):
        raise InvalidTypeError(f"limit_bytes is {limit_bytes!r}: give a number of bytes")
    if not 0 <= limit_bytes < 1 << 62:
        raise InvalidInputError(
            f"limit_bytes is {format_integer(limit_bytes)}: give a number of bytes from 0 on"
        )
    _native.set_shared_cache_limit(limit_bytes)
