"""`TableFiles`: files of tables, whatever their format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tundish.errors import InvalidInputError
from tundish.packing.arguments import IntegerArray
from tundish.packing.sources.arrow.columns import (
    arrow_errors,
    choose_length_column,
    choose_sample_columns,
    count_batches,
    import_pyarrow,
)
from tundish.packing.sources.arrow.samples import ArrowSamples, Block
from tundish.packing.sources.columns import concatenated

__all__ = ["TableFiles"]


@dataclass(frozen=True)
class TableFiles(ABC):
    """Files whose rows are the samples, file after file. There is a subclass for each format."""

    paths: Sequence[Path]
    kind: ClassVar[str]

    @abstractmethod
    def _schema(self, path: Path) -> Any:
        """The schema of a file."""

    @abstractmethod
    def _batches(self, path: Path, name: str) -> Iterable[Any]:
        """The record batches of a file, with the column `name` alone."""

    @abstractmethod
    def _blocks(self, path: Path, name: str) -> Iterable[Block]:
        """All rows of a file, which has the column `name`."""

    def lengths(self, column: str | None) -> IntegerArray:
        import_pyarrow(f"reading {self.kind}")
        parts: list[IntegerArray] = []
        for path in self.paths:
            where = str(path)
            with arrow_errors(where, self.kind):
                name = choose_length_column(self._schema(path), column, where)
                parts += count_batches(self._batches(path, name), name, where)
        return concatenated(parts)

    def samples(self, column: str | None, columns: Sequence[str] | None) -> ArrowSamples:
        import_pyarrow(f"reading {self.kind}")
        blocks: list[Block] = []
        chosen = []
        for path in self.paths:
            with arrow_errors(str(path), self.kind):
                chosen.append(choose_sample_columns(self._schema(path), column, columns, str(path)))
                blocks += self._blocks(path, chosen[-1][0])
        tokens, others = chosen[0]
        for path, (_, own) in zip(self.paths, chosen, strict=True):
            if set(own) != set(others):
                differing = ", ".join(map(repr, sorted(set(own) ^ set(others))))
                raise InvalidInputError(
                    f"{path}: its columns of lists of numbers differ from those of {self.paths[0]} in {differing}; "
                    "write the files alike, or name the columns to read with columns="
                )
        return ArrowSamples(blocks, tokens, others)
