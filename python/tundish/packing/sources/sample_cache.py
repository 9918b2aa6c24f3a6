"""A cache of samples: Arrow files that are converted once from files of samples, and then mapped by every process.

An entry of the cache is a folder `NAME-KEY`. The key is a hash of the paths, sizes and times of change of the files,
and of what is read of them.

Invariants:
    An entry appears whole. A conversion that fails or is killed leaves none.
    Processes convert one after the other, where the file system has locks: the others wait and find the entry. The
    lock of a process ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tundish import logs
from tundish.errors import AlreadyExistsError, InvalidInputError, StorageError
from tundish.new_folder import NewFolder
from tundish.packing.arguments import make_folder
from tundish.progress import ProgressLine

_logger = logging.getLogger("tundish.packing")

# Another form of the entries needs another number here.
_VERSION = 1
_DATA, _SOURCE, _LOCK = "samples.arrow", "source.json", ".lock"
# Characters of a source's name in the name of its entry: the file system limits the whole.
_NAME_CHARACTERS = 100

Identity = list[tuple[str, int, int]]


def converted(
    cache: Path,
    paths: Sequence[Path],
    reads: Sequence[Any],
    tables: Callable[[], Iterator[Any]],
    rows: Callable[[], int],
    progress: bool | None,
) -> Path:
    """Return the Arrow file of the samples in some files. It is made if the cache does not have it.

    Args:
        cache: The folder; it is made if it is missing.
        paths: The files.
        reads: What is read of them, as JSON has it.
        tables: Gives the samples as tables of pyarrow, one after the other. It is called again if they turn out to have
            other columns or types than the first one.
        rows: Gives the number of samples, for the progress line.
        progress: Show progress; by default on a terminal.

    Raises:
        InvalidInputError: A file changed meanwhile.
        StorageError: The file system refused, or is full.
        Errors of `tables`.
    """
    identity = _identity(paths)
    key = hashlib.blake2b(json.dumps([_VERSION, identity, list(reads)]).encode(), digest_size=16).hexdigest()
    entry = cache / f"{paths[0].name[:_NAME_CHARACTERS]}-{key}"
    if (entry / _DATA).exists():
        return entry / _DATA
    make_folder(cache, "cache")
    with _lock(cache), ProgressLine("samples", progress) as line:
        if not (entry / _DATA).exists():
            start = time.perf_counter()
            try:
                _convert(entry, paths, identity, _counted(tables, rows(), line))
            except AlreadyExistsError:
                # Without locks, another process was faster.
                if not (entry / _DATA).exists():
                    raise
            size = (entry / _DATA).stat().st_size / 2**20
            seconds = time.perf_counter() - start
            logs.info(_logger, "converted %s to %s: %.1f MiB in %.1f s", paths[0], entry, size, seconds)
    return entry / _DATA


def _identity(paths: Sequence[Path]) -> Identity:
    """The absolute path, size and time of change of each file."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise StorageError(error.errno, f"cannot be examined: {error.strerror}", str(path)) from error
        found.append((str(path.absolute()), status.st_size, status.st_mtime_ns))
    return found


@contextlib.contextmanager
def _lock(cache: Path) -> Iterator[None]:
    """Wait until no other process converts into the cache."""
    path = cache / _LOCK
    try:
        file = path.open("ab")
    except OSError as error:
        raise StorageError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error
    with file:
        # Without locks, each process converts, and the first to finish publishes.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _counted(
    tables: Callable[[], Iterator[Any]], rows: int, line: ProgressLine
) -> Callable[[], Iterator[Any]]:
    def count() -> Iterator[Any]:
        done = 0
        for table in tables():
            yield table
            done += table.num_rows
            line.update("converting", done, rows)

    return count


class _OtherSchemaError(Exception):
    """The tables need another schema than the first one had."""

    def __init__(self, schema: Any) -> None:
        super().__init__(schema)
        self.schema = schema


def _convert(
    entry: Path, paths: Sequence[Path], identity: Identity, tables: Callable[[], Iterator[Any]]
) -> None:
    schema = None
    while True:
        try:
            with NewFolder(entry) as folder:
                _write(folder, tables, schema)
                if _identity(paths) != identity:
                    raise InvalidInputError(
                        f"{paths[0]}: was changed while it was converted; open it again when nobody writes to it"
                    )
                named = [
                    {"path": path, "bytes": size, "modified_ns": modified}
                    for path, size, modified in identity
                ]
                folder.write_json(_SOURCE, {"version": _VERSION, "files": named})
            return
        except _OtherSchemaError as error:
            schema = error.schema


def _write(folder: NewFolder, tables: Callable[[], Iterator[Any]], schema: Any) -> None:
    """Write the tables with this schema, or that of the first.

    Raises:
        _OtherSchemaError: Not all tables fit it. The error has the schema that they fit.
    """
    import pyarrow
    import pyarrow.ipc

    with folder.open(_DATA) as file, contextlib.ExitStack() as writing:
        needed, writer = schema, None
        for table in tables():
            own = table.schema.remove_metadata()
            needed = (
                own if needed is None else pyarrow.unify_schemas([needed, own], promote_options="permissive")
            )
            if writer is None:
                schema = needed
                writer = writing.enter_context(pyarrow.ipc.new_stream(file, schema))
            if needed == schema:
                writer.write_table(_fitted(table, schema))
        if needed != schema:
            raise _OtherSchemaError(needed)


def _fitted(table: Any, schema: Any) -> Any:
    """The table with the columns and types of a schema; columns that it lacks are null."""
    import pyarrow

    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pyarrow.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pyarrow.table(columns, schema=schema)
