"""Columns of Arrow: which hold token counts or tokens, and how many tokens each row has.

Invariants: lists are counted by their offsets; no token is read, and no row becomes a Python object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, StorageError, missing_extra
from tundish.packing.arguments import IntegerArray
from tundish.packing.sources.columns import (
    INPUT_IDS,
    LENGTH_COLUMNS,
    choose_column,
    format_names,
    narrowed,
)

__all__ = [
    "arrow_errors",
    "check_lengths",
    "choose_length_column",
    "choose_sample_columns",
    "count_batches",
    "import_pyarrow",
    "lengths_of",
]


def import_pyarrow(purpose: str) -> Any:
    """Return the module pyarrow.

    Raises:
        MissingExtraError: It is not installed. The message says that `purpose` needs it.
    """
    try:
        import pyarrow
    except ImportError:
        missing_extra("arrow", "pyarrow", purpose)
    return pyarrow


@contextlib.contextmanager
def arrow_errors(where: str, kind: str) -> Iterator[None]:
    """Raise errors of pyarrow that a file causes as errors that name the file and what it should be."""
    import pyarrow

    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise StorageError(error.errno, f"cannot be read: {error.strerror or error}", where) from error
        # pyarrow raises such errors for damaged files too.
        raise _damaged(where, kind, error) from error
    except pyarrow.ArrowMemoryError:
        raise
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(where, kind, error) from error


def choose_length_column(schema: Any, column: str | None, where: str) -> str:
    """Return the column with the token counts: `column`, or else `length`, or else `input_ids`.

    Raises:
        InvalidInputError: There is no such column.
        InvalidTypeError: It holds neither integers nor lists of integers.
    """
    import pyarrow

    name = choose_column(schema.names, column, LENGTH_COLUMNS, where)
    kind = schema.field(name).type
    if not pyarrow.types.is_integer(kind) and not _is_token_list(kind):
        wanted = f"token counts are integers, or lists of integers to be counted{_hint(kind)}"
        raise _wrong_type(schema, name, wanted, where)
    return name


def choose_sample_columns(
    schema: Any, column: str | None, columns: Sequence[str] | None, where: str
) -> tuple[str, list[str]]:
    """Return the column with the tokens, and the columns that are read beside it.

    Args:
        schema: The schema of the table.
        column: The column with the tokens; None means `input_ids`.
        columns: The columns beside it; None means all other lists of numbers.
        where: The source, for messages.

    Raises:
        InvalidInputError: There is no such column.
        InvalidTypeError: One holds no lists of numbers.
    """
    tokens = choose_column(schema.names, column, (INPUT_IDS,), where)
    kind = schema.field(tokens).type
    if not _is_token_list(kind):
        raise _wrong_type(
            schema, tokens, f"the tokens of a sample are a list of integers{_hint(kind)}", where
        )
    # The tokens are given as `input_ids`, so another column of this name has no place beside them.
    taken = {tokens, INPUT_IDS}
    if columns is None:
        once = [name for name in schema.names if schema.names.count(name) == 1 and name not in taken]
        return tokens, [name for name in once if _is_number_list(schema.field(name).type)]
    others = [choose_column(schema.names, name, (), where) for name in columns if name not in taken]
    for name in others:
        if not _is_number_list(schema.field(name).type):
            raise _wrong_type(schema, name, "columns of samples are lists of numbers", where)
    return tokens, others


def _wrong_type(schema: Any, name: str, wanted: str, where: str) -> InvalidTypeError:
    return InvalidTypeError(
        f"{where}: column {name!r} holds {schema.field(name).type}, and {wanted}; {format_names(schema.names)}"
    )


def lengths_of(column: Any) -> IntegerArray:
    """Return the token count of each row of a chunked array.

    Args:
        column: A chunked array of integers, which are the counts, or of lists, whose entries are counted.

    Returns:
        Shape (rows,), of a signed dtype. Below 0 where a row is null or holds no token count.
    """
    import pyarrow
    import pyarrow.compute

    counts = column
    if not pyarrow.types.is_integer(column.type):
        counts = pyarrow.compute.list_value_length(column)
    if not counts.null_count:
        return _as_signed(counts)
    found = _as_signed(counts.fill_null(0)).astype(np.int64)
    found[counts.is_null().to_numpy()] = -1
    return found


def check_lengths(
    lengths: IntegerArray,
    column: Any,
    name: str,
    where: str,
    *,
    first_row: int = 0,
    indices: NDArray[np.int64] | None = None,
) -> None:
    """Refuse the first row that is null or holds no token count.

    Args:
        lengths: What `lengths_of` returned for `column`, or its entries at `indices`.
        column: The chunked array.
        name: The name of the column.
        where: The source, for messages.
        first_row: The number of the first row of `column` in the source.
        indices: The row of each sample; None means all rows in their order. Messages name the number of the sample.

    Raises:
        InvalidInputError: There is such a row.
    """
    import pyarrow

    if not len(lengths) or lengths.min() >= 0:
        return
    sample = int(np.argmax(lengths < 0))
    row = sample if indices is None else int(indices[sample])
    found = f"{where}: row {first_row + sample} of column {name!r}"
    # Not by taking the row out: one whose offsets are damaged would end the process.
    if column.slice(row, 1).null_count:
        raise InvalidInputError(f"{found} is null; every sample needs a value")
    if pyarrow.types.is_integer(column.type):
        raise InvalidInputError(f"{found} holds {column[row].as_py()}; a token count is in 0 … 2**63 - 1")
    raise InvalidInputError(f"{found} ends before it begins: the data is damaged, write it again")


def count_batches(batches: Iterable[Any], name: str, where: str) -> Iterator[IntegerArray]:
    """Yield the token counts of the column `name` of each record batch of a file, int32 if they fit, else int64.

    Raises:
        InvalidInputError: A row is null or holds no token count.
    """
    import pyarrow

    row = 0
    for batch in batches:
        column = pyarrow.chunked_array([batch.column(name)])
        # Checks that there are as many offsets as rows: reading others would end the process.
        column.validate()
        counts = lengths_of(column)
        check_lengths(counts, column, name, where, first_row=row)
        yield narrowed(counts)
        row += len(counts)


def _as_signed(counts: Any) -> IntegerArray:
    found: IntegerArray = counts.to_numpy()
    # What int64 does not hold turns negative, which `check_lengths` refuses.
    return found.astype(np.int64) if found.dtype == np.uint64 else found


def _is_token_list(kind: Any) -> bool:
    import pyarrow

    # A column of nothing but empty lists has the value type null.
    return _is_list(kind) and (
        pyarrow.types.is_integer(kind.value_type) or pyarrow.types.is_null(kind.value_type)
    )


def _is_number_list(kind: Any) -> bool:
    import pyarrow

    if not _is_list(kind):
        return False
    types, value = pyarrow.types, kind.value_type
    return bool(types.is_integer(value) or types.is_floating(value) or types.is_boolean(value))


def _is_list(kind: Any) -> bool:
    import pyarrow

    # pyarrow 15 has no list views.
    names = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(check(kind) for name in names if (check := getattr(pyarrow.types, name, None)))


def _hint(kind: Any) -> str:
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        return f" (cast it to {kind.value_type})"
    if types.is_string(kind) or types.is_large_string(kind):
        return " (tokenize the texts first)"
    return ""


def _damaged(where: str, kind: str, error: BaseException) -> InvalidInputError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return InvalidInputError(f"{where}: cannot be read as {kind}: {reason}; write it again")
