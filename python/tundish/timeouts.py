"""Checks timeout arguments and turns them into seconds."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["timeout_seconds"]


def timeout_seconds(timeout: timedelta | float) -> float:
    """`timeout` in seconds.

    Raises:
        InvalidTypeError: `timeout` is neither a number nor a `timedelta`.
        InvalidInputError: `timeout` is not positive and finite.
    """
    given: Any = timeout
    try:
        if isinstance(given, (str, bytes)):
            # `float` would read it.
            raise TypeError
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError, OverflowError):
        raise InvalidTypeError(
            f"timeout must be a number of seconds or a timedelta, not of type {type(timeout).__name__}"
        ) from None
    if not (0 < seconds < math.inf):
        raise InvalidInputError(f"timeout is {timeout!r}: give a positive number of seconds or a timedelta")
    return seconds
