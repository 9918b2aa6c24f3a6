"""Parquet files, read a row group at a time.

Invariant: of a column that is counted, some millions of tokens are in memory at once, whatever the size of its row
groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish.packing.arguments.integer_arrays import IntegerArray
from tundish.packing.sources.arrow.columns import (
    append_lengths,
    arrow_errors,
    choose_length_column,
    choose_sample_columns,
    import_pyarrow,
    same_columns,
)
from tundish.packing.sources.arrow.samples import ArrowSamples
from tundish.packing.sources.columns import LengthsBuffer

__all__ = ["ParquetFiles"]

_KIND = "a Parquet file"
# Values that are decoded at once: 16 MiB of int32.
_VALUES_AT_ONCE = 4 * 2**20
# Bytes that are read from a file at once. Without a limit, pyarrow reads a column of a whole row group.
_READ_BYTES = 2**20


@dataclass(frozen=True)
class ParquetFiles:
    """Parquet files whose rows are the samples, file after file."""

    paths: Sequence[Path]

    def lengths(self, column: str | None) -> IntegerArray:
        import_pyarrow("reading a Parquet file")
        found = LengthsBuffer()
        for path in self.paths:
            where = str(path)
            with arrow_errors(where, _KIND), _open(where) as file:
                name = choose_length_column(file.schema_arrow, column, where)
                append_lengths(found, _batches(file, name), name, where)
        return found.finish()

    def samples(self, column: str | None, columns: Sequence[str] | None) -> ArrowSamples:
        import_pyarrow("reading a Parquet file")
        blocks: list[_RowGroup] = []
        chosen = []
        for path in self.paths:
            where = str(path)
            with arrow_errors(where, _KIND), _open(where) as file:
                chosen.append(choose_sample_columns(file.schema_arrow, column, columns, where))
                first_row = 0
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    blocks.append(_RowGroup(where, group, first_row, rows))
                    first_row += rows
        return ArrowSamples(blocks, *same_columns(self.paths, chosen))


@dataclass(frozen=True)
class _RowGroup:
    """One row group of a file."""

    where: str
    group: int
    first_row: int
    rows: int
    is_mapped: bool = False

    def read(self, names: Sequence[str]) -> Any:
        with arrow_errors(self.where, _KIND), _open(self.where) as file:
            # Workers of a `DataLoader` are as many as there are processors.
            return file.read_row_group(self.group, columns=list(names), use_threads=False)


def _open(where: str) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(where, buffer_size=_READ_BYTES)


def _batches(file: Any, name: str) -> Iterator[Any]:
    """Record batches with the column `name`, each of as many rows as hold a limited number of values."""
    for group in range(file.num_row_groups):
        described = file.metadata.row_group(group)
        values = sum(
            chunk.num_values
            for chunk in map(described.column, range(described.num_columns))
            if chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.")
        )
        rows = max(1, described.num_rows * _VALUES_AT_ONCE // max(values, described.num_rows, 1))
        yield from file.iter_batches(batch_size=rows, row_groups=[group], columns=[name], use_threads=False)
