"""Names of columns, and the integer type of token counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.arguments import IntegerArray

__all__ = [
    "INPUT_IDS",
    "LENGTH_COLUMNS",
    "as_column",
    "as_columns",
    "choose_column",
    "concatenated",
    "format_names",
    "narrowed",
]

INPUT_IDS = "input_ids"
# Where token counts are looked for, in this order, unless a column is named.
LENGTH_COLUMNS = ("length", INPUT_IDS)
_LARGEST_INT32 = 2**31 - 1
# A message lists at most so many names.
_SHOWN_NAMES = 24


def as_column(column: Any) -> str | None:
    """The argument `column`: None, or the name of a column."""
    if column is None or (isinstance(column, str) and column):
        return column
    raise InvalidTypeError(f"column must be the name of a column, not {column!r}")


def as_columns(columns: Any) -> list[str] | None:
    """The argument `columns`: None, or names of columns."""
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Sequence):
        raise InvalidTypeError(f"columns must be a list of names of columns, not {format_type(columns)}")
    for name in columns:
        if not isinstance(name, str) or not name:
            raise InvalidTypeError(f"columns must be a list of names of columns, and one entry is {name!r}")
    return list(dict.fromkeys(columns))


def format_names(names: Sequence[str]) -> str:
    """Format names for a message, as in "its columns are 'id' and 'text'"."""
    shown = [repr(name) for name in names[:_SHOWN_NAMES]]
    if len(names) > _SHOWN_NAMES:
        shown.append(f"{len(names) - _SHOWN_NAMES} more")
    if not shown:
        return "it has no columns"
    if len(shown) == 1:
        return f"its only column is {shown[0]}"
    return f"its columns are {', '.join(shown[:-1])} and {shown[-1]}"


def choose_column(names: Sequence[str], column: str | None, defaults: Sequence[str], where: str) -> str:
    """Return the column that is asked for, or else the first of `defaults` that there is.

    Args:
        names: The columns of the source.
        column: The column that the caller named, or None.
        defaults: The columns to look for if none is named.
        where: The source, for messages.

    Raises:
        InvalidInputError: There is no such column, or more than one.
    """
    wanted = defaults if column is None else (column,)
    for name in wanted:
        if names.count(name) > 1:
            raise InvalidInputError(f"{where} has {names.count(name)} columns named {name!r}; rename them")
        if name in names:
            return name
    missing = " and no ".join(map(repr, wanted))
    advice = "" if not names else "; give the name of one" if column is not None else "; name one with column"
    raise InvalidInputError(f"{where} has no column {missing}: {format_names(names)}{advice}")


def narrowed(lengths: IntegerArray) -> IntegerArray:
    """Return `lengths` as int32 if every value fits, else as int64."""
    if lengths.dtype == np.int32:
        return lengths
    fits = not len(lengths) or int(lengths.max()) <= _LARGEST_INT32
    return lengths.astype(np.int32 if fits else np.int64, copy=False)


def concatenated(parts: Iterable[IntegerArray]) -> IntegerArray:
    """Return the token counts of all `parts` in new memory: int32 if every part is int32, else int64."""
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])
