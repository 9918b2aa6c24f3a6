"""Arrow IPC files, in the file format and in the stream format. They are mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish.errors import InvalidInputError
from tundish.packing.sources.arrow.columns import arrow_errors
from tundish.packing.sources.arrow.files import TableFiles

__all__ = ["IpcFiles"]

_KIND = "an Arrow IPC file"
_FILE_MAGIC = b"ARROW1"


class IpcFiles(TableFiles):
    """Arrow IPC files."""

    kind = _KIND

    def _schema(self, path: Path) -> Any:
        return _open(path).schema

    def _batches(self, path: Path, name: str) -> Iterator[Any]:
        # A compressed batch is decoded in its turn.
        reader = _open_columns(path, [name])
        if hasattr(reader, "get_batch"):
            return map(reader.get_batch, range(reader.num_record_batches))
        return iter(reader)

    def _blocks(self, path: Path, name: str) -> list[_File]:
        return [_File(str(path), sum(batch.num_rows for batch in self._batches(path, name)))]


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
