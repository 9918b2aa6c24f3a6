"""Integers as arguments, and their bounds."""

from __future__ import annotations

import operator
from typing import Any

from tundish.errors import InvalidInputError, InvalidTypeError, format_integer

__all__ = ["as_integer", "as_optional_integer", "as_threads"]

# A larger number is a typing error: no machine that this runs on has as many processors.
MOST_THREADS = 512


def as_integer(value: Any, name: str, smallest: int, largest: int) -> int:
    """`value` as an int in `smallest` … `largest`; booleans are refused."""
    if isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be an integer, not {value!r:.100}")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(f"{name} must be an integer, not {value!r:.100}") from None
    if not smallest <= number <= largest:
        raise InvalidInputError(f"{name} is {format_integer(number)}; it must be in {smallest} … {largest}")
    return number


def as_optional_integer(value: Any, name: str, smallest: int, largest: int) -> int | None:
    """`value` as `as_integer` gives it; None stays None."""
    return None if value is None else as_integer(value, name, smallest, largest)


def as_threads(threads: Any) -> int | None:
    """The argument `threads`: None, or 1 … `MOST_THREADS`."""
    return as_optional_integer(threads, "threads", 1, MOST_THREADS)
