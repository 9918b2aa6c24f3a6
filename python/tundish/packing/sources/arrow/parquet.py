"""Parquet files, read a row group at a time.

Invariant: of a column that is counted, half a million tokens are in memory at once, whatever the size of its row
groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish.packing.sources.arrow.columns import arrow_errors
from tundish.packing.sources.arrow.files import TableFiles

__all__ = ["ParquetFiles"]

_KIND = "a Parquet file"
# Values that are decoded at once: 2 MiB of int32, which caches hold. Eight times as many take a fifth longer.
_VALUES_AT_ONCE = 2**19
# Bytes that are read from a file at once. Without a limit, pyarrow reads a column of a whole row group.
_READ_BYTES = 2**20


class ParquetFiles(TableFiles):
    """Parquet files."""

    kind = _KIND

    def _schema(self, path: Path) -> Any:
        with _open(path) as file:
            return file.schema_arrow

    def _batches(self, path: Path, name: str) -> Iterator[Any]:
        with _open(path) as file:
            for group in range(file.num_row_groups):
                described = file.metadata.row_group(group)
                values = sum(
                    chunk.num_values
                    for chunk in map(described.column, range(described.num_columns))
                    if chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.")
                )
                rows = max(1, described.num_rows * _VALUES_AT_ONCE // max(values, described.num_rows, 1))
                yield from file.iter_batches(
                    batch_size=rows, row_groups=[group], columns=[name], use_threads=False
                )

    def _blocks(self, path: Path, name: str) -> Iterator[_RowGroup]:  # noqa: ARG002 (as other files)
        first_row = 0
        with _open(path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                yield _RowGroup(str(path), group, first_row, rows)
                first_row += rows


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


def _open(path: Path | str) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES)
