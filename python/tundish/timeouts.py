"""Checks timeout arguments and turns them into seconds."""

from __future__ import annotations

import math
from datetime import timedelta
from numbers import Real
from typing import Any

from tundish.errors import InvalidInputError, InvalidTypeError, format_type


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
            f"timeout is {format_type(timeout)}: give a number of seconds or a timedelta"
        ) from None
    if not (0 < seconds < math.inf):
        raise InvalidInputError(f"timeout is {timeout!r}: give a positive number of seconds or a timedelta")
    return seconds


def check_seconds(timeout: Any, *, may_be_zero: bool = True) -> float:
    """A timeout in seconds as a float; infinite if it is too large for one.

    Raises:
        InvalidTypeError: `timeout` is no number.
        InvalidInputError: `timeout` is negative or not a number, or zero where that is refused.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise InvalidTypeError(f"timeout is {timeout!r}: give a number of seconds")
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = -math.inf if timeout < 0 else math.inf
    if math.isnan(seconds) or seconds < 0 or (seconds == 0 and not may_be_zero):
        least = "0 seconds or more" if may_be_zero else "more than 0 seconds"
        raise InvalidInputError(f"timeout is {seconds!r}: give {least}")
    return seconds
