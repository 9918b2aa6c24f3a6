"""Tables in memory, and datasets of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.arguments import IntegerArray
from tundish.packing.sources.arrow.columns import (
    check_lengths,
    choose_length_column,
    choose_sample_columns,
    import_pyarrow,
    lengths_of,
)
from tundish.packing.sources.arrow.samples import ArrowSamples
from tundish.packing.sources.columns import INPUT_IDS, narrowed

__all__ = ["TableSource", "as_table_source"]

# Told by its name: importing datasets would take a second.
_DATASET = "datasets.arrow_dataset", "Dataset"


def as_table_source(source: Any) -> TableSource | None:
    """Return `source` as a `TableSource` if it is a table or an array of pyarrow, or a Hugging Face `Dataset`.

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
        return TableSource(
            _Table(source, "the Dataset"),
            # Unsigned integers, in as many chunks as the dataset was made in.
            None if indices is None else indices.column(0).to_numpy().astype(np.int64, copy=False),
        )
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
    return TableSource(_Table(source, f"the {name}"))


@dataclass(frozen=True)
class TableSource:
    """One table, and the rows that are the samples, in their order; None means all of them."""

    table: _Table
    indices: NDArray[np.int64] | None = None

    def lengths(self, column: str | None) -> IntegerArray:
        table, where = self.table.open(), self.table.where
        name = choose_length_column(table.schema, column, where)
        held = table.column(name)
        found = lengths_of(held)
        if self.indices is not None:
            # Rows that are not selected need no value.
            found = found[self.indices]
        check_lengths(found, held, name, where, indices=self.indices)
        return narrowed(found)

    def samples(self, column: str | None, columns: Sequence[str] | None) -> ArrowSamples:
        tokens, others = choose_sample_columns(self.table.open().schema, column, columns, self.table.where)
        return ArrowSamples([self.table], tokens, others, self.indices)


@dataclass(frozen=True)
class _Table:
    """A pyarrow table, or a Hugging Face dataset, which pickles the names of mapped files and not their data."""

    owner: Any
    where: str
    first_row: int = 0
    is_mapped: bool = True

    @property
    def rows(self) -> int:
        return int(self.open().num_rows)

    def open(self) -> Any:
        return getattr(self.owner, "data", self.owner)

    def read(self, names: Sequence[str]) -> Any:  # noqa: ARG002 (other columns cost nothing)
        return self.open()
