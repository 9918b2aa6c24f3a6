"""Checks timeout arguments and turns them into seconds or deadlines."""

from __future__ import annotations

import math
import numbers
import time
from datetime import timedelta

from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["deadline_of", "timeout_seconds"]


def deadline_of(seconds: float | None) -> float | None:
    """The `time.monotonic()` value at which a wait of `seconds` ends; None for a wait without end.

    Raises:
        InvalidTypeError: `seconds` is no number.
        InvalidInputError: `seconds` is NaN.
    """
    given: object = seconds
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise InvalidTypeError(f"timeout is {given!r}: give a number of seconds, or None to wait without end")
    if math.isnan(given):
        raise InvalidInputError("timeout is NaN: give a number of seconds, or None to wait without end")
    return time.monotonic() + float(given)


def timeout_seconds(timeout: timedelta | float) -> float:
    """`timeout` in seconds.

    Raises:
        InvalidTypeError: `timeout` is neither a number nor a `timedelta`.
        InvalidInputError: `timeout` is not positive and finite.
    """
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError, OverflowError):
        raise InvalidTypeError(
            f"timeout must be a number of seconds or a timedelta, not of type {type(timeout).__name__}"
        ) from None
    if not (0 < seconds < math.inf):
        raise InvalidInputError(f"timeout is {timeout!r}: give a positive number of seconds or a timedelta")
    return seconds
