"""Reports the shared memory of this process, and limits the memory that it keeps for its next arrays."""

from __future__ import annotations

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, format_integer

__all__ = ["set_cache_limit", "stats"]


def stats() -> dict[str, int]:
    """Return the shared memory that arrays of this process take.

    Returns:
        Bytes by name. `mapped`: arrays in use, made here or attached to. `cached`: freed arrays, whose memory is kept
        for the next ones. `escaped`: closed arrays that a process still reads through a view. `peak`: the most that
        arrays made here ever took.

    Example:
        >>> import numpy as np
        >>> import tundish as td
        >>> with td.shm.SharedArray.from_array(np.zeros(1000)):
        ...     td.shm.stats()["mapped"] >= 8000
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
