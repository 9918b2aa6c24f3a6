"""`ArrowSamples`: rows of Arrow tables as samples.

Invariants: a row is a view of the table's memory, but for booleans, which Arrow stores as bits. Decoded tables are kept
up to a limit; mapped ones take no memory and are all kept.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError
from tundish.packing.sources.columns import INPUT_IDS
from tundish.packing.sources.sample_rows import SampleRows

__all__ = ["ArrowSamples", "Block"]

# Decoded tables that are kept. The newest is kept in any case.
_KEPT_BYTES = 256 * 2**20


class Block(Protocol):
    """Some consecutive rows of a source. It pickles without them.

    Attributes:
        where: The block, for messages.
        first_row: The number in `where` of its first row.
        rows: The number of rows.
        is_mapped: Whether its tables take no memory of the process.
    """

    @property
    def where(self) -> str: ...
    @property
    def first_row(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def is_mapped(self) -> bool: ...

    def read(self, names: Sequence[str]) -> Any:
        """Return a table with the columns `names`."""


class ArrowSamples(SampleRows):
    """Rows of Arrow tables, as dicts of numpy arrays.

    Args:
        blocks: The tables, one after the other.
        tokens: The column that becomes `input_ids`.
        others: Further columns, lists of numbers. A sample lacks those that are null in its row.
        indices: The row of each sample, shape (samples,); None takes all rows in their order.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        tokens: str,
        others: Sequence[str],
        indices: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        self._blocks = list(blocks)
        self._ends = list(itertools.accumulate(block.rows for block in blocks))
        self._keys = {INPUT_IDS: tokens} | {name: name for name in others}
        self._indices = indices
        self._open: OrderedDict[int, tuple[dict[str, Any], int]] = OrderedDict()

    def __len__(self) -> int:
        if self._indices is not None:
            return len(self._indices)
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _read(self, number: int) -> dict[str, NDArray[Any]]:
        row = number if self._indices is None else int(self._indices[number])
        place = bisect.bisect_right(self._ends, row)
        block = self._blocks[place]
        row -= self._ends[place] - block.rows
        sample = {}
        for key, column in self._columns(place).items():
            values = column[row].values
            if values is None and key != INPUT_IDS:
                continue
            if values is None or values.null_count:
                raise InvalidInputError(
                    f"{block.where}: row {block.first_row + row} of column {self._keys[key]!r} "
                    f"{'is' if values is None else 'holds a'} null"
                )
            sample[key] = values.to_numpy(zero_copy_only=False)
        return sample

    def _columns(self, place: int) -> dict[str, Any]:
        """The columns of a block by their keys in a sample."""
        if place in self._open:
            self._open.move_to_end(place)
            return self._open[place][0]
        block = self._blocks[place]
        table = block.read(list(self._keys.values()))
        columns = {key: table.column(name) for key, name in self._keys.items()}
        size = 0 if block.is_mapped else sum(column.nbytes for column in columns.values())
        self._open[place] = columns, size
        while len(self._open) > 1 and sum(size for _, size in self._open.values()) > _KEPT_BYTES:
            self._open.popitem(last=False)
        return columns
