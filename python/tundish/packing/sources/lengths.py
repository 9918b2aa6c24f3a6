"""`lengths` and `open_samples`: token counts and samples of whatever users keep their samples in.

A path, a folder or a glob stands for files of one kind. Each kind has its reader in `sources`.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    StorageError,
    TundishError,
    format_count,
    format_type,
)
from tundish.packing.arguments import IntegerArray, as_absolute, as_integer_array, as_path
from tundish.packing.sources.json_lines import JsonLinesFiles
from tundish.packing.sources.megatron import MegatronFile
from tundish.packing.sources.python import PythonSamples, is_map_style
from tundish.packing.sources.source import DecodedSource, Source, choose_column
from tundish.packing.sources.tables import as_tables, ipc_files, parquet_files
from tundish.regular_files import open_regular_file, read_regular_file

if TYPE_CHECKING:
    from tundish.packing.dataset import SampleSource

# The kind of a file by the ending of its name.
_ENDINGS = {
    ".npy": "npy",
    ".npz": "npz",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".idx": "megatron",
    ".bin": "megatron",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
# Kinds of which several files are one dataset.
_IN_FILES = frozenset({"parquet", "arrow", "jsonl"})
_MAGIC = {b"\x93NUMPY": "npy", b"PAR1": "parquet", b"ARROW1": "arrow", b"MMIDIDX": "megatron"}
_ZIP_MAGIC = b"PK"
# Hugging Face's `state.json` lists the files of a dataset, some 50 bytes each.
_STATE_BYTES = 64 * 2**20


def lengths(source: Any, column: str | None = None) -> IntegerArray:
    """Return the number of tokens of each sample, for `pack`.

    | source | what is read |
    |---|---|
    | `.npy` file | the array, mapped into memory |
    | `.npz` file | its array `column`; by default its only one, else `length` or `lengths` |
    | Hugging Face `Dataset`, or the folder of its `save_to_disk` | a column, in the order of `select` and `shuffle` |
    | Parquet or Arrow IPC files; `pyarrow.Table` | a column, some rows at a time |
    | `.idx` file of Megatron-LM | the header of `column="sequences"`, the default, or `"documents"` |
    | JSON Lines (`.jsonl`) | a field of each line |
    | iterable of samples, or map-style dataset | a key of each mapping; the entries of each sequence of tokens |

    A column, field or key holds token counts, or lists of tokens. Lists in Arrow memory are counted by their offsets:
    no token is read.

    Args:
        source: A path; a glob, or a folder or list of files, which are one dataset in the order of their names; or an
            object in memory. A folder must hold such files alone, of one kind; names that begin with `.` or `_` are
            left out.
        column: The column with the token counts or the tokens. By default `length`, or `input_ids` if there is none.

    Returns:
        Shape (samples,), int32 if every count fits, else int64. A mapped `.npy` file keeps its integer dtype.

    Raises:
        InvalidInputError: There is no such column; a row is null, holds a null or is below 0; a file is damaged or of
            no known kind.
            Of `.npy` and `.npz` files, `pack` refuses counts below 0.
        InvalidTypeError: The source, or what the column holds, is of a wrong type.
        NotFoundError: There is no such file, or a glob matches none.
        StorageError: A file cannot be read.
        MissingExtraError: pyarrow is not installed, and the source needs it.
        OutOfMemoryError: A table does not fit into memory, or its file is damaged.

    Example:
        >>> import tundish as td
        >>> samples = [{"input_ids": [5, 2, 8]}, {"input_ids": [7]}]
        >>> td.packing.lengths(samples)
        array([3, 1], dtype=int32)
    """
    column = _as_column(column)
    if isinstance(source, np.ndarray) and source.ndim == 1 and source.dtype.kind in "iu":
        if column is not None:
            raise InvalidInputError(
                f"source is an array without columns, and column {column!r} was asked for"
            )
        return as_integer_array(source, "source")
    return _open(source).lengths(column)


def open_samples(
    source: Any,
    column: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> SampleSource:
    """Return the samples of a source, for `PackedDataset`, in the order of `lengths`.

    Rows of Arrow memory, and sequences of Megatron-LM, are views of mapped files. Of Parquet files, decoded row groups
    are kept up to 256 MiB, and so are parsed lines of JSON. If much is decoded again, one warning of the logger
    `tundish.packing` says so, and `cache` helps. The samples pickle to the workers of a `DataLoader` by their paths.

    Args:
        source: As for `lengths`. `.npy` and `.npz` files hold no samples.
        column: The column with the tokens, which becomes `input_ids`. By default `input_ids`; for a `.idx` file
            "sequences", or "documents".
        columns: The columns to read beside the tokens. By default `labels`, masks, and all other columns that are lists
            of numbers; of samples in memory, all keys. Labels and masks that are no lists of numbers are refused. In
            JSON Lines, the first lines of the first file tell which columns are lists of numbers. A key that holds them
            later only is refused with its line.
        cache: For Parquet files and JSON Lines: a folder for Arrow files, to which the samples are converted once, and
            which are then mapped. It is made if it is missing. It finds a conversion by the paths, sizes and times of
            change of the files. One process converts, and others that ask for the same wait. Conversions stay until you
            remove the folder.
        progress: Show the progress of a conversion; by default on a terminal.

    Returns:
        A map-style dataset. A sample is a mapping with `input_ids`, or an array of tokens for Megatron-LM. A list or a
        map-style dataset is returned as it is, unless a column is named.

    Raises:
        InvalidInputError: There is no such column, the files of a source have different ones, or a file is damaged or
            holds no tokens; or there is a cache, and the source is mapped or in memory without one.
        InvalidTypeError: The column holds no lists of integers, labels or a mask no lists of numbers, or the source
            gives no samples by number.
        NotFoundError: There is no such file, or a glob matches none.
        StorageError: A file cannot be read.
        MissingExtraError: pyarrow is not installed, and the source needs it.
        OutOfMemoryError: A table does not fit into memory, or its file is damaged.

    Example:
        >>> import tundish as td
        >>> samples = td.packing.open_samples([{"tokens": [5, 2, 8]}, {"tokens": [7]}], "tokens")
        >>> plan = td.pack(td.packing.lengths(samples), max_length=4)
        >>> td.PackedDataset(samples, plan)[0]["input_ids"].tolist()
        [5, 2, 8, 7]
    """
    column, columns = _as_column(column), _as_columns(columns)
    opened = _open(source)
    samples: SampleSource
    if cache is None:
        samples = opened.samples(column, columns)
    elif isinstance(opened, DecodedSource):
        samples = opened.cached_samples(column, columns, as_absolute(cache, "cache"), progress)
    else:
        raise InvalidInputError(
            "cache is for Parquet files and JSON Lines, whose samples are decoded each time that they are read: leave "
            "it out, this source is mapped or in memory"
        )
    return samples


def _as_column(column: Any) -> str | None:
    if column is None or (isinstance(column, str) and column):
        return column
    raise InvalidTypeError(f"column must be the name of a column, not {column!r}")


def _as_columns(columns: Any) -> list[str] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Sequence):
        raise InvalidTypeError(f"columns must be a list of names of columns, not {format_type(columns)}")
    for name in columns:
        if not isinstance(name, str) or not name:
            raise InvalidTypeError(f"columns must be a list of names of columns, and one entry is {name!r}")
    return list(dict.fromkeys(columns))


def _open(source: Any) -> Source:
    """The reader of a source."""
    if isinstance(source, str | os.PathLike) or _is_list_of_paths(source):
        return _open_files(*_find_files(source))
    if (tables := as_tables(source)) is not None:
        return tables
    if isinstance(source, Mapping | bytes) or not (hasattr(source, "__iter__") or is_map_style(source)):
        hint = ""
        if isinstance(source, Mapping):
            hint = f": give one of its entries, which are {', '.join(map(repr, list(source)[:8]))}"
        raise InvalidTypeError(f"source is {format_type(source)}; give a path, a dataset or samples{hint}")
    return PythonSamples(source)


def _open_files(kind: str, paths: list[Path]) -> Source:
    match kind:
        case "parquet":
            return parquet_files(paths)
        case "arrow":
            return ipc_files(paths)
        case "jsonl":
            return JsonLinesFiles(paths)
        case "megatron":
            return MegatronFile(paths[0])
    return _NumpyFile(paths[0])


def _is_list_of_paths(source: Any) -> bool:
    return (
        isinstance(source, list | tuple)
        and len(source) > 0
        and all(isinstance(entry, str | os.PathLike) for entry in source)
    )


# ---- Files of numpy ----


class _NumpyFile(NamedTuple):
    """Token counts in a `.npy` file, which is mapped, or in one of the arrays of a `.npz` file."""

    path: Path

    def lengths(self, column: str | None) -> IntegerArray:
        path = self.path
        try:
            with open_regular_file(path, "a file of numpy") as file:
                if file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC:
                    file.seek(0)
                    with np.load(file, allow_pickle=False) as arrays:
                        return self._array_of(arrays, column)
            with warnings.catch_warnings():
                # The error that follows says the same.
                warnings.simplefilter("ignore")
                mapped: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        except TundishError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error
            # A damaged file makes numpy, zipfile and zlib raise some fifteen types, which name no file.
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise InvalidInputError(
                f"{path}: cannot be read as a file of numpy: {reason}; write it again with numpy.save or numpy.savez"
            ) from error
        if column is not None:
            raise InvalidInputError(
                f"{path}: is one array without columns, and column {column!r} was asked for"
            )
        # A copy in text mode adds a byte to the header, and shifts every number after it.
        behind = path.stat().st_size - mapped.offset - mapped.nbytes
        if behind > 0:
            raise InvalidInputError(
                f"{path}: holds {format_count(behind, 'byte')} more than the array in its header: it was changed after "
                "numpy.save wrote it; write it again"
            )
        # Checked here, where the message can name the file.
        return as_integer_array(mapped, str(path))

    def _array_of(self, arrays: Any, column: str | None) -> IntegerArray:
        names = list(arrays.files)
        # The only array needs no name.
        chosen = names[0] if column is None and len(names) == 1 else None
        name = chosen or choose_column(names, column, ("length", "lengths"), str(self.path))
        return as_integer_array(arrays[name], f"{self.path}: array {name!r}")

    def samples(self, column: str | None, columns: Sequence[str] | None) -> NoReturn:  # noqa: ARG002 (as other sources)
        raise InvalidInputError(
            f"{self.path}: holds token counts and no tokens; give PackedDataset the samples that were counted"
        )


# ---- The files that a path stands for ----


def _find_files(source: Any) -> tuple[str, list[Path]]:
    """Return the kind of the files that `source` stands for, and the files in the order of their samples.

    Args:
        source: A path, a glob, or a list of paths.

    Returns:
        One of "npy", "npz", "parquet", "arrow", "megatron" and "jsonl", and the files: at least one, but for a saved
        dataset without rows.

    Raises:
        InvalidInputError: A file is of no kind that holds samples, or the files are of several kinds.
        NotFoundError: There is no such file.
        StorageError: A file or folder cannot be read.
    """
    if isinstance(source, list | tuple):
        paths = [as_path(path, f"source[{number}]") for number, path in enumerate(source)]
        for path in paths:
            if _mode(path) is None:
                raise NotFoundError(errno.ENOENT, "there is no such file", str(path))
        return _one_kind(paths, "the list")
    path = as_path(source, "source")
    mode = _mode(path)
    if mode is not None:
        return _folder(path) if stat.S_ISDIR(mode) else (_kind(path), [_index_of(path)])
    if glob.has_magic(str(path)):
        # A pattern may begin at the root, which Path.glob refuses.
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
        files = [one for one in found if not one.is_dir()]
        if not files:
            raise NotFoundError(errno.ENOENT, "no file matches this glob", str(path))
        return _one_kind(files, str(path))
    index = path.with_name(f"{path.name}.idx")
    if index.is_file():
        # The name that Megatron-LM itself gives to both files.
        return "megatron", [index]
    reason = (
        "there is no such file or folder on this machine; of other datasets, give what load_dataset returns"
    )
    raise NotFoundError(errno.ENOENT, reason, str(source))


def _mode(path: Path) -> int | None:
    """The type of what is at `path`, or None if nothing is there."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error


def _kind(path: Path) -> str:
    with open_regular_file(path, "a file with samples") as file:
        begin = file.read(8)
    by_content = next((name for magic, name in _MAGIC.items() if begin.startswith(magic)), None)
    kind = _ENDINGS.get(path.suffix.lower(), by_content)
    if kind is None:
        raise InvalidInputError(
            f"{path}: is of no known kind; the names of files with samples end in {', '.join(_ENDINGS)}; load others "
            "yourself, for example with datasets.load_dataset, and give the samples"
        )
    return kind


def _index_of(path: Path) -> Path:
    if path.suffix.lower() != ".bin":
        return path
    index = path.with_suffix(".idx")
    if _mode(index) is None:
        raise NotFoundError(errno.ENOENT, f"does not exist; it is the index of {path.name}", str(index))
    return index


def _one_kind(paths: Sequence[Path], where: str) -> tuple[str, list[Path]]:
    """The kind of several files, which are one dataset."""
    kinds: dict[str, Path] = {}
    for path in paths:
        kinds.setdefault(_kind(path), path)
    if len(kinds) > 1:
        named = " and ".join(f"{path} ({kind})" for kind, path in kinds.items())
        raise InvalidInputError(f"{where}: has files of several kinds, {named}: name those with the samples")
    kind = next(iter(kinds))
    if kind not in _IN_FILES and len(paths) > 1:
        raise InvalidInputError(
            f"{where}: has {format_count(len(paths), 'file')} of kind {kind}, each of which is a dataset: give them "
            "one by one, and pack them with pack_datasets"
        )
    return kind, [_index_of(path) for path in paths]


def _folder(path: Path) -> tuple[str, list[Path]]:
    """The files of a folder: one that `Dataset.save_to_disk` wrote, or one of files with samples alone."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error
    if "state.json" in names:
        return "arrow", _saved_dataset(path)
    if "dataset_dict.json" in names:
        splits = [name for name in names if (path / name / "state.json").is_file()]
        raise InvalidInputError(
            f"{path}: is a folder of a DatasetDict with the splits {', '.join(splits)}: give the folder of one"
        )
    # Spark and others write marks beside their data.
    files = [path / name for name in names if not name.startswith((".", "_"))]
    others = [one.name for one in files if one.is_dir() or _ENDINGS.get(one.suffix.lower()) not in _IN_FILES]
    if others or not files:
        found = f"holds {', '.join(others[:8])}" if others else "holds no files"
        raise InvalidInputError(
            f"{path}: is a folder that {found}, and not Parquet, Arrow or JSON Lines files alone: name the files with "
            f"the samples, for example by a glob such as {path / '*.parquet'}"
        )
    return _one_kind(files, f"{path}: is a folder that")


def _saved_dataset(path: Path) -> list[Path]:
    """The files of a dataset that `Dataset.save_to_disk` wrote; none if it has no rows."""
    state_path = path / "state.json"
    try:
        state = json.loads(read_regular_file(state_path, "the state of a saved Dataset", _STATE_BYTES))
        names = [entry["filename"] for entry in state["_data_files"]]
        files = [path / name for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{state_path}: is not what Dataset.save_to_disk writes: {error!r}; save the dataset again"
        ) from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InvalidInputError(
            f"{state_path}: was written by a version of datasets before 2.0; load the dataset and save it again"
        )
    for file in files:
        if not file.is_file():
            raise NotFoundError(
                errno.ENOENT, f"{state_path} names this file, which does not exist", str(file)
            )
    return files
