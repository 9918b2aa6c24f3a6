"""Arrow IPC files, in the file format and in the stream format. They are mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish.errors import InvalidInputError
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

__all__ = ["IpcFiles"]

_KIND = "an Arrow IPC file"
_FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class IpcFiles:
    """Arrow IPC files whose rows are the samples, file after file."""

    paths: Sequence[Path]

    def lengths(self, column: str | None) -> IntegerArray:
        import_pyarrow("reading an Arrow file")
        found = LengthsBuffer()
        for path in self.paths:
            where = str(path)
            with arrow_errors(where, _KIND):
                name = choose_length_column(_open(path).schema, column, where)
                append_lengths(found, _batches(path, [name]), name, where)
        return found.finish()

    def samples(self, column: str | None, columns: Sequence[str] | None) -> ArrowSamples:
        import_pyarrow("reading an Arrow file")
        blocks, chosen = [], []
        for path in self.paths:
            where = str(path)
            with arrow_errors(where, _KIND):
                tokens, others = choose_sample_columns(_open(path).schema, column, columns, where)
                blocks.append(_File(where, sum(batch.num_rows for batch in _batches(path, [tokens]))))
                chosen.append((tokens, others))
        return ArrowSamples(blocks, *same_columns(self.paths, chosen))


@dataclass(frozen=True)
class _File:
    """All rows of one file."""

    where: str
    rows: int
    first_row: int = 0
    is_mapped: bool = True

    def read(self, names: Sequence[str]) -> Any:
        with arrow_errors(self.where, _KIND):
            table = _open_columns(Path(self.where), names).read_all()
            # Offsets beyond the tokens would end the process.
            table.validate(full=True)
            return table


def _batches(path: Path, names: Sequence[str]) -> Iterator[Any]:
    """The record batches of a file, with the columns `names` alone. A compressed one is decoded in its turn."""
    reader = _open_columns(path, names)
    if hasattr(reader, "get_batch"):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def _open_columns(path: Path, names: Sequence[str]) -> Any:
    import pyarrow.ipc

    schema = _open(path).schema
    fields = sorted(schema.get_field_index(name) for name in names)
    return _open(path, pyarrow.ipc.IpcReadOptions(included_fields=fields))


def _open(path: Path, options: Any = None) -> Any:
    import pyarrow
    import pyarrow.ipc

    if not path.stat().st_size:
        # An empty file cannot be mapped.
        raise InvalidInputError(f"{path}: is empty, and no Arrow IPC file; write it again")
    mapped = pyarrow.memory_map(str(path))
    magic = mapped.read(len(_FILE_MAGIC))
    mapped.seek(0)
    if magic == _FILE_MAGIC:
        return pyarrow.ipc.open_file(mapped, options=options)
    return pyarrow.ipc.open_stream(mapped, options=options)
