"""Tables that pyarrow reads: in memory, Hugging Face datasets, Arrow IPC files and Parquet files.

Invariants:
    Lists are counted by their offsets: no token is read, and no row becomes a Python object. Only the bits that say
    which tokens are null are looked at, if there are any.
    Of a Parquet column that is counted, half a million tokens are in memory at once, however large its row groups are.
    A row is a view of its table's memory, but for booleans, which Arrow stores as bits.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    OutOfMemoryError,
    StorageError,
    format_type,
    missing_extra,
)
from tundish.packing.arguments import IntegerArray
from tundish.packing.samples import MEANINGFUL_KEYS
from tundish.packing.sources.sample_cache import converted
from tundish.packing.sources.source import (
    INPUT_IDS,
    LENGTH_COLUMNS,
    Kept,
    SampleRows,
    choose_column,
    concatenated,
    format_names,
    narrowed,
)

# A Hugging Face dataset is told by its name: importing datasets would take a second.
_DATASET = "datasets.arrow_dataset", "Dataset"
_FILE_MAGIC = b"ARROW1"
# Values that are decoded at once: 2 MiB of int32, which caches hold. Eight times as many take a fifth longer.
_VALUES_AT_ONCE = 2**19
# Bytes that are read from a file at once. Without a limit, pyarrow reads a column of a whole row group.
_READ_BYTES = 2**20
# In the place of a token count: the tokens hold a null.
_HOLDS_NULL = -(2**63)


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


def as_tables(source: Any) -> Tables | None:
    """Return `source` as `Tables` if it is a table or an array of pyarrow, or a Hugging Face `Dataset`.

    Raises:
        InvalidInputError: It is a dataset whose rows are computed when they are read.
        InvalidTypeError: It is a pyarrow object of another type.
    """
    name = type(source).__name__
    if any((one.__module__, one.__name__) == _DATASET for one in type(source).__mro__):
        if source.format["type"] == "custom":
            raise InvalidInputError(
                "the Dataset computes its rows when they are read (set_transform or with_transform), so its table does "
                "not say how many tokens they have: store them with Dataset.map, or count them as "
                "lengths(dataset[i] for i in range(len(dataset)))"
            )
        indices = source._indices
        # Unsigned integers, in as many chunks as the dataset was made in.
        rows = None if indices is None else indices.column(0).to_numpy().astype(np.int64, copy=False)
        return Tables([_MemoryTable(source, "the Dataset")], rows)
    if type(source).__module__.partition(".")[0] != "pyarrow":
        return None
    pyarrow = import_pyarrow("reading a table")
    if isinstance(source, pyarrow.RecordBatch):
        source = pyarrow.Table.from_batches([source])
    if isinstance(source, pyarrow.Array | pyarrow.ChunkedArray):
        # An array has no name of its own.
        source, name = pyarrow.table({INPUT_IDS: source}), "array"
    if not isinstance(source, pyarrow.Table):
        raise InvalidTypeError(f"source is {format_type(source)} of pyarrow; give a Table")
    return Tables([_MemoryTable(source, f"the {name}")])


def ipc_files(paths: Sequence[Path]) -> Tables:
    """Return the rows of Arrow IPC files, in the file format or the stream format. They are mapped into memory."""
    import_pyarrow("reading an Arrow IPC file")
    return Tables([_IpcFile(str(path)) for path in paths])


def parquet_files(paths: Sequence[Path]) -> ParquetFiles:
    """Return the rows of Parquet files."""
    import_pyarrow("reading a Parquet file")
    return ParquetFiles([_ParquetFile(str(path)) for path in paths])


class Tables(NamedTuple):
    """Tables one after the other, and the rows that are the samples, in their order; None means all of them."""

    tables: Sequence[_Table]
    indices: NDArray[np.int64] | None = None

    def lengths(self, column: str | None) -> IntegerArray:
        parts: list[IntegerArray] = []
        for table in self.tables:
            with _errors_of(table):
                name = _choose_length_column(table.schema(), column, table.where)
                row = 0
                for values in table.parts_of(name):
                    parts.append(_count(values, name, table.where, row, self.indices))
                    row += len(values)
        return concatenated(parts)

    def samples(self, column: str | None, columns: Sequence[str] | None) -> ArrowSamples:
        chosen: list[tuple[str, list[str]]] = []
        blocks: list[_Block] = []
        for table in self.tables:
            with _errors_of(table):
                chosen.append(_choose_sample_columns(table.schema(), column, columns, table.where))
                first_row = 0
                for part, rows in enumerate(table.rows_of_blocks(chosen[-1][0])):
                    blocks.append(_Block(table, part, first_row, rows))
                    first_row += rows
        tokens, others = chosen[0] if chosen else (INPUT_IDS, [])
        for table, (_, own) in zip(self.tables, chosen, strict=True):
            if set(own) != set(others):
                differing = ", ".join(map(repr, sorted(set(own) ^ set(others))))
                raise InvalidInputError(
                    f"{table.where}: its columns of lists of numbers differ from those of {self.tables[0].where} in "
                    f"{differing}; write the files alike, or name the columns to read with columns="
                )
        return ArrowSamples(blocks, tokens, others, self.indices)


class ParquetFiles(Tables):
    """Parquet files one after the other."""

    tables: Sequence[_ParquetFile]

    def cached_samples(
        self, column: str | None, columns: Sequence[str] | None, cache: Path, progress: bool | None
    ) -> ArrowSamples:
        # Checks the columns of all files.
        names = self.samples(column, columns).names
        files = [
            converted(
                cache,
                [Path(table.where)],
                names,
                functools.partial(_tables_of, table, names),
                functools.partial(_row_count, table, names[0]),
                progress,
            )
            for table in self.tables
        ]
        return ipc_files(files).samples(names[0], names[1:])


def _row_count(file: _ParquetFile, name: str) -> int:
    return sum(file.rows_of_blocks(name))


def _tables_of(file: _ParquetFile, names: Sequence[str]) -> Iterator[Any]:
    """The columns `names` of a Parquet file, in tables of bounded size. The first one has no rows."""
    import pyarrow

    with _errors_of(file):
        schema = file.schema()
        yield pyarrow.schema([schema.field(name) for name in names]).empty_table()
        for batch in file.batches(names):
            table = pyarrow.Table.from_batches([batch])
            # Checks that there are as many offsets as rows: reading others would end the process.
            table.validate()
            yield table


class ArrowSamples(SampleRows):
    """Rows of Arrow tables, as dicts of numpy arrays.

    Args:
        blocks: The rows of the tables, one block after the other.
        tokens: The column that becomes `input_ids`.
        others: Further columns, lists of numbers. A sample lacks those that are null in its row.
        indices: The row of each sample, shape (samples,); None takes all rows in their order.

    Attributes:
        names: The columns, of which the first becomes `input_ids`.
    """

    def __init__(
        self, blocks: Sequence[_Block], tokens: str, others: Sequence[str], indices: IntegerArray | None
    ) -> None:
        self._blocks = list(blocks)
        self._ends = list(itertools.accumulate(block.rows for block in blocks))
        self.names = [tokens, *others]
        self._keys = {INPUT_IDS: tokens} | {name: name for name in others}
        self._indices = indices
        self._kept: Kept[dict[str, Any]] = Kept(self._blocks[0].table.where if blocks else "")

    def __len__(self) -> int:
        if self._indices is not None:
            return len(self._indices)
        return self._ends[-1] if self._ends else 0

    def column_types(self) -> dict[str, Any] | None:
        if not self._blocks:
            return None
        with _errors_of(self._blocks[0].table):
            schema = self._blocks[0].table.schema()
        return {key: schema.field(name).type for key, name in self._keys.items()}

    def _read(self, number: int) -> dict[str, NDArray[Any]]:
        row = number if self._indices is None else int(self._indices[number])
        place = bisect.bisect_right(self._ends, row)
        block = self._blocks[place]
        row -= self._ends[place] - block.rows
        sample = {}
        for key, column in (self._kept.get(place) or self._columns(place)).items():
            # A column whose rows are all null may have the type null, which has no values.
            values = getattr(column[row], "values", None)
            if values is None and key != INPUT_IDS:
                continue
            if values is None or values.null_count:
                raise InvalidInputError(
                    f"{block.table.where}: row {block.first_row + row} of column {self._keys[key]!r} "
                    f"{'is' if values is None else 'holds a'} null"
                )
            sample[key] = values.to_numpy(zero_copy_only=False)
        return sample

    def _columns(self, place: int) -> dict[str, Any]:
        """Read the columns of a block, by their keys in a sample."""
        block = self._blocks[place]
        with _errors_of(block.table):
            table = block.table.read(block.part, self.names)
        columns = {key: table.column(name) for key, name in self._keys.items()}
        size = sum(column.nbytes for column in columns.values()) if block.table.is_decoded else 0
        return self._kept.add(place, columns, size)


class _Block(NamedTuple):
    """Some consecutive rows of a table: part `part`, from row `first_row` on. It pickles without them."""

    table: _Table
    part: int
    first_row: int
    rows: int


class _Table(Protocol):
    """A table. It pickles as the name of its file, if it has one.

    Attributes:
        where: The table, for messages.
        kind: What its file should be, for messages.
        is_decoded: Whether reading a part takes memory of the process.
    """

    @property
    def where(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def is_decoded(self) -> bool: ...

    def schema(self) -> Any:
        """Its schema."""

    def parts_of(self, name: str) -> Iterator[Any]:
        """The column `name` in parts, each a chunked array."""

    def rows_of_blocks(self, name: str) -> Iterator[int]:
        """The number of rows of each part that is read at once. The table has the column `name`."""

    def read(self, part: int, names: Sequence[str]) -> Any:
        """Read the columns `names` of a part, as a table of pyarrow."""


@dataclass(frozen=True)
class _MemoryTable:
    """A pyarrow table, or a Hugging Face dataset, which pickles the names of mapped files and not their data."""

    owner: Any
    where: str
    kind: str = "a table"
    is_decoded: bool = False

    def schema(self) -> Any:
        return self._table().schema

    def parts_of(self, name: str) -> Iterator[Any]:
        yield self._table().column(name)

    def rows_of_blocks(self, name: str) -> Iterator[int]:  # noqa: ARG002 (as other tables)
        yield self._table().num_rows

    def read(self, part: int, names: Sequence[str]) -> Any:  # noqa: ARG002 (other columns cost nothing)
        return self._table()

    def _table(self) -> Any:
        return getattr(self.owner, "data", self.owner)


@dataclass(frozen=True)
class _IpcFile:
    where: str
    kind: str = "an Arrow IPC file"
    is_decoded: bool = False

    def schema(self) -> Any:
        return self._open().schema

    def parts_of(self, name: str) -> Iterator[Any]:
        # A compressed batch is decoded in its turn.
        reader = self._open_columns([name])
        if hasattr(reader, "get_batch"):
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = iter(reader)
        return (_checked_part(batch, name) for batch in batches)

    def rows_of_blocks(self, name: str) -> Iterator[int]:
        yield sum(map(len, self.parts_of(name)))

    def read(self, part: int, names: Sequence[str]) -> Any:  # noqa: ARG002 (there is one)
        table = self._open_columns(names).read_all()
        # Offsets beyond the tokens would end the process.
        table.validate(full=True)
        return table

    def _open_columns(self, names: Sequence[str]) -> Any:
        import pyarrow.ipc

        schema = self.schema()
        fields = sorted(schema.get_field_index(name) for name in names)
        return self._open(pyarrow.ipc.IpcReadOptions(included_fields=fields))

    def _open(self, options: Any = None) -> Any:
        import pyarrow
        import pyarrow.ipc

        if not Path(self.where).stat().st_size:
            # An empty file cannot be mapped.
            raise InvalidInputError(f"{self.where}: is empty, and no Arrow IPC file; write it again")
        mapped = pyarrow.memory_map(self.where)
        magic = mapped.read(len(_FILE_MAGIC))
        mapped.seek(0)
        if magic == _FILE_MAGIC:
            return pyarrow.ipc.open_file(mapped, options=options)
        return pyarrow.ipc.open_stream(mapped, options=options)


@dataclass(frozen=True)
class _ParquetFile:
    """A Parquet file, read a row group at a time."""

    where: str
    kind: str = "a Parquet file"
    is_decoded: bool = True

    def schema(self) -> Any:
        with self._open() as file:
            return file.schema_arrow

    def parts_of(self, name: str) -> Iterator[Any]:
        return (_checked_part(batch, name) for batch in self.batches([name]))

    def batches(self, names: Sequence[str]) -> Iterator[Any]:
        """The columns `names` as record batches of about `_VALUES_AT_ONCE` values of the largest column."""
        with self._open() as file:
            for group in range(file.num_row_groups):
                described = file.metadata.row_group(group)
                chunks = list(map(described.column, range(described.num_columns)))
                values = max(
                    sum(
                        chunk.num_values
                        for chunk in chunks
                        if chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.")
                    )
                    for name in names
                )
                rows = max(1, described.num_rows * _VALUES_AT_ONCE // max(values, described.num_rows, 1))
                yield from file.iter_batches(
                    batch_size=rows, row_groups=[group], columns=list(names), use_threads=False
                )

    def rows_of_blocks(self, name: str) -> Iterator[int]:  # noqa: ARG002 (as other tables)
        with self._open() as file:
            yield from (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))

    def read(self, part: int, names: Sequence[str]) -> Any:
        with self._open() as file:
            # Workers of a `DataLoader` are as many as there are processors.
            return file.read_row_group(part, columns=list(names), use_threads=False)

    def _open(self) -> Any:
        import pyarrow.parquet

        status = Path(self.where).stat()
        footer = _footer(self.where, status.st_size, status.st_mtime_ns)
        return pyarrow.parquet.ParquetFile(self.where, metadata=footer, buffer_size=_READ_BYTES)


# Reading the footer takes more time than reading a small row group.
@functools.lru_cache(maxsize=64)
def _footer(path: str, size: int, modified_ns: int) -> Any:  # noqa: ARG001 (a file that changed has another footer)
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path)


def _checked_part(batch: Any, name: str) -> Any:
    """The column of a record batch of a file, as a chunked array."""
    import pyarrow

    column = pyarrow.chunked_array([batch.column(name)])
    # Checks that there are as many offsets as rows: reading others would end the process.
    column.validate()
    return column


@contextlib.contextmanager
def _errors_of(table: _Table) -> Iterator[None]:
    """Raise errors of pyarrow as errors that name the table and what it should be."""
    import pyarrow

    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise StorageError(
                error.errno, f"cannot be read: {error.strerror or error}", table.where
            ) from error
        # pyarrow raises such errors for damaged files too.
        raise _damaged(table, error) from error
    except pyarrow.ArrowMemoryError as error:
        raise OutOfMemoryError(
            f"{table.where}: cannot be read as {table.kind}: {error}; it is damaged, or needs more memory than there is"
        ) from error
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(table, error) from error


def _damaged(table: _Table, error: BaseException) -> InvalidInputError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return InvalidInputError(f"{table.where}: cannot be read as {table.kind}: {reason}; write it again")


# ---- Columns ----


def _choose_length_column(schema: Any, column: str | None, where: str) -> str:
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


def _choose_sample_columns(
    schema: Any, column: str | None, columns: Sequence[str] | None, where: str
) -> tuple[str, list[str]]:
    """Return the column with the tokens, and the columns that are read beside it.

    Args:
        schema: The schema of the table.
        column: The column with the tokens; None means `input_ids`.
        columns: The columns beside it; None means labels, masks, and all other lists of numbers.
        where: The source, for messages.

    Raises:
        InvalidInputError: There is no such column, or there are two.
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
        # A mask is looked for by its name before its type: left out, it would have prompts trained on.
        numbers = {field.name for field in schema if _is_number_list(field.type)}
        columns = [name for name in dict.fromkeys(schema.names) if name in MEANINGFUL_KEYS or name in numbers]
    others = [choose_column(schema.names, name, (), where) for name in columns if name not in taken]
    for name in others:
        kind = schema.field(name).type
        if not _is_number_list(kind) and not (name in MEANINGFUL_KEYS and _holds_nulls_alone(kind)):
            advice = f"columns of samples are lists of numbers{_hint(kind)}"
            raise _wrong_type(
                schema, name, f"{advice}: convert it, or name the columns to read with columns=", where
            )
    return tokens, others


def _wrong_type(schema: Any, name: str, wanted: str, where: str) -> InvalidTypeError:
    return InvalidTypeError(
        f"{where}: column {name!r} holds {schema.field(name).type}, and {wanted}; {format_names(schema.names)}"
    )


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


def _holds_nulls_alone(kind: Any) -> bool:
    """Whether every value of a column is null, or a list of nulls, which is refused unless it is empty."""
    import pyarrow

    return pyarrow.types.is_null(kind) or (_is_list(kind) and pyarrow.types.is_null(kind.value_type))


def number_lists(values: Sequence[Any], where: str) -> Any:
    """Return lists of numbers and Nones as an array of pyarrow. Lists without entries are lists of int64.

    Raises:
        InvalidInputError: Arrow has no type for the values together. `where` names them.
        InvalidTypeError: They are no lists of numbers.
    """
    import pyarrow

    try:
        array = pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(f"{where} cannot be stored as a list of numbers: {reason}") from error
    if _holds_nulls_alone(array.type):
        array = array.cast(pyarrow.list_(pyarrow.int64()))
    if not _is_number_list(array.type):
        raise InvalidTypeError(
            f"{where} is no list of numbers, and a cache holds nothing else: name the columns to read with columns="
        )
    return array


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
        return " (tokenize the texts first, with td.hf.tokenize)"
    return ""


# ---- Token counts ----


def _count(
    column: Any, name: str, where: str, first_row: int, indices: NDArray[np.int64] | None
) -> IntegerArray:
    """Return the token count of each row of a chunked array, or of its rows at `indices`; refuse the first bad one.

    Args:
        column: A chunked array of integers, which are the counts, or of lists, whose entries are counted.
        name: The name of the column, for messages.
        where: The source, for messages.
        first_row: The number of the first row of `column` in the source.
        indices: The row of each sample; None means all rows in their order. Messages number the samples.

    Returns:
        Shape (samples,), int32 if every count fits, else int64.

    Raises:
        InvalidInputError: A row is null, is no token count, or holds a null.
    """
    import pyarrow

    counts = _counts_of(column)
    # Rows that are not selected need no value.
    found = counts if indices is None else counts[indices]
    if not len(found) or found.min() >= 0:
        return narrowed(found)
    sample = int(np.argmax(found < 0))
    row = sample if indices is None else int(indices[sample])
    place = f"{where}: row {first_row + sample} of column {name!r}"
    # Not by taking the row out: one whose offsets are damaged would end the process.
    if column.slice(row, 1).null_count:
        raise InvalidInputError(f"{place} is null; every sample needs a value")
    if pyarrow.types.is_integer(column.type):
        raise InvalidInputError(f"{place} holds {column[row].as_py()}; a token count is in 0 … 2**63 - 1")
    if found[sample] == _HOLDS_NULL:
        raise InvalidInputError(f"{place} holds a null, and every token needs a value")
    raise InvalidInputError(f"{place} ends before it begins: the data is damaged, write it again")


def _counts_of(column: Any) -> IntegerArray:
    """The token count of each row, of a signed dtype; below 0 where a row is null, holds a null or is no count."""
    import pyarrow
    import pyarrow.compute

    if pyarrow.types.is_integer(column.type):
        return _without_nulls(column)
    counts = _without_nulls(pyarrow.compute.list_value_length(column))
    if not any(chunk.values.null_count for chunk in column.chunks):
        return counts
    # Offsets beyond the tokens would end the process.
    column.validate(full=True)
    holds_null = [
        row.values is not None and row.values.null_count > 0 for chunk in column.chunks for row in chunk
    ]
    return np.where(holds_null, _HOLDS_NULL, counts.astype(np.int64))


def _without_nulls(counts: Any) -> IntegerArray:
    """Integers as an array of a signed dtype, -1 where they are null. What int64 does not hold turns negative."""
    if not counts.null_count:
        found: IntegerArray = counts.to_numpy()
        return found.astype(np.int64) if found.dtype == np.uint64 else found
    found = counts.fill_null(0).to_numpy().astype(np.int64)
    found[counts.is_null().to_numpy()] = -1
    return found
