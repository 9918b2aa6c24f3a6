"""Rows of Hugging Face streams as arrays.

In its default format, `datasets` makes a Python list of each row, token by token. Where the rows lie in Arrow tables,
their lists are arrays already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

__all__ = ["arrow_rows", "in_arrow_format"]


def in_arrow_format(source: Any) -> Any | None:
    """A stream of the same rows, each as an Arrow table, with the same states.

    Args:
        source: The source of a `PackedStream`.

    Returns:
        A `datasets.IterableDataset` in the epoch of the source; None if the source is no such stream in the default
        format, or `datasets` makes the rows in Python (as `map` does), decodes them, or begins them at a state.
    """
    examples: Any = getattr(source, "_ex_iterable", None)
    features: Any = getattr(source, "features", None)
    try:
        if features is None or examples.iter_arrow is None or examples.is_typed:
            return None
        if getattr(source._formatting, "format_type", None) or source._starting_state_dict:
            return None
        if any(features._column_requires_decoding.values()):
            return None
    except AttributeError:
        # These names are private to `datasets`, and another release may lack one.
        return None
    tables = source.with_format("arrow")
    tables.set_epoch(source.epoch)
    return tables


def arrow_rows(features: Any, listed: Collection[str]) -> Callable[[Any], dict[str, Any]]:
    """A function that takes a table of one row, and gives the row as `datasets` does, but with arrays for lists.

    Args:
        features: The columns, of type `datasets.Features`.
        listed: Names of columns that stay lists.
    """
    import pyarrow.types as types

    def is_array(kind: Any) -> bool:
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        return bool(is_list and (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)))

    arrays = {
        field.name: field.name not in listed and is_array(field.type) for field in features.arrow_schema
    }

    def read(table: Any) -> dict[str, Any]:
        row = {}
        for name, is_array in arrays.items():
            column = table.column(name)
            (row[name],) = column.to_numpy() if is_array else column.to_pylist()
        return row

    return read
