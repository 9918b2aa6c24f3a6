"""`lengths` and `open_samples`: token counts and samples of whatever users keep their samples in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.arguments import IntegerArray, as_integer_array
from tundish.packing.sources.arrow.ipc import IpcFiles
from tundish.packing.sources.arrow.parquet import ParquetFiles
from tundish.packing.sources.arrow.tables import as_table_source
from tundish.packing.sources.columns import as_column, as_columns
from tundish.packing.sources.files import find_files
from tundish.packing.sources.json_lines import JsonLinesFiles
from tundish.packing.sources.megatron_files import MegatronFile
from tundish.packing.sources.numpy_files import NpyFile, NpzFile
from tundish.packing.sources.sample_counts import PythonSamples, is_map_style

if TYPE_CHECKING:
    from tundish.packing.dataset.samples import SampleSource

__all__ = ["lengths", "open_samples"]


class _Source(Protocol):
    def lengths(self, column: str | None) -> IntegerArray: ...
    def samples(self, column: str | None, columns: Sequence[str] | None) -> Any: ...


_FILES: dict[str, Callable[[list[Path]], _Source]] = {
    "npy": lambda paths: NpyFile(paths[0]),
    "npz": lambda paths: NpzFile(paths[0]),
    "parquet": ParquetFiles,
    "arrow": IpcFiles,
    "megatron": lambda paths: MegatronFile(paths[0]),
    "jsonl": JsonLinesFiles,
}


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
            object in memory.
        column: The column with the token counts or the tokens. By default `length`, or `input_ids` if there is none.

    Returns:
        Shape (samples,), int32 if every count fits, else int64. A mapped `.npy` file keeps its integer dtype.

    Raises:
        InvalidInputError: There is no such column, or a row is null or below 0; a file is damaged or of no known kind.
            Of `.npy` and `.npz` files, `pack` refuses counts below 0.
        InvalidTypeError: The source, or what the column holds, is of a wrong type.
        NotFoundError: There is no such file, or a glob matches none.
        StorageError: A file cannot be read.
        MissingExtraError: pyarrow is not installed, and the source needs it.

    Example:
        >>> import tundish as td
        >>> samples = [{"input_ids": [5, 2, 8]}, {"input_ids": [7]}]
        >>> td.packing.lengths(samples)
        array([3, 1], dtype=int32)
    """
    column = as_column(column)
    if isinstance(source, np.ndarray) and source.ndim == 1 and source.dtype.kind in "iu":
        if column is not None:
            raise InvalidInputError(
                f"source is an array without columns, and column {column!r} was asked for"
            )
        return as_integer_array(source, "source")
    return _open(source).lengths(column)


def open_samples(
    source: Any, column: str | None = None, *, columns: Sequence[str] | None = None
) -> SampleSource:
    """Return the samples of a source, for `PackedDataset`, in the order of `lengths`.

    Rows of Arrow memory, and sequences of Megatron-LM, are views of mapped files. Of Parquet files, decoded row groups
    are kept up to 256 MiB. The samples pickle to the workers of a `DataLoader` by their paths.

    Args:
        source: As for `lengths`. `.npy` and `.npz` files hold no samples.
        column: The column with the tokens, which becomes `input_ids`. By default `input_ids`; for a `.idx` file
            "sequences", or "documents".
        columns: The columns to read beside the tokens. By default all other columns that are lists of numbers, such as
            `labels` and masks; of samples in memory, all keys.

    Returns:
        A map-style dataset. A sample is a mapping with `input_ids`, or an array of tokens for Megatron-LM. A list or a
        map-style dataset is returned as it is, unless a column is named.

    Raises:
        InvalidInputError: There is no such column, the files of a source have different ones, or a file is damaged or
            holds no tokens.
        InvalidTypeError: The column holds no lists of integers, or the source gives no samples by number.
        NotFoundError: There is no such file, or a glob matches none.
        StorageError: A file cannot be read.
        MissingExtraError: pyarrow is not installed, and the source needs it.

    Example:
        >>> import tundish as td
        >>> samples = td.packing.open_samples([{"tokens": [5, 2, 8]}, {"tokens": [7]}], "tokens")
        >>> plan = td.pack(td.packing.lengths(samples), max_length=4)
        >>> td.PackedDataset(samples, plan)[0]["input_ids"].tolist()
        [5, 2, 8, 7]
    """
    samples: SampleSource = _open(source).samples(as_column(column), as_columns(columns))
    return samples


def _open(source: Any) -> _Source:
    """The reader of a source."""
    if isinstance(source, str | os.PathLike) or _is_list_of_paths(source):
        kind, paths = find_files(source)
        return _FILES[kind](paths)
    table = as_table_source(source)
    if table is not None:
        return table
    if isinstance(source, Mapping | bytes) or not (hasattr(source, "__iter__") or is_map_style(source)):
        hint = ""
        if isinstance(source, Mapping):
            hint = f": give one of its entries, which are {', '.join(map(repr, list(source)[:8]))}"
        raise InvalidTypeError(f"source is {format_type(source)}; give a path, a dataset or samples{hint}")
    return PythonSamples(source)


def _is_list_of_paths(source: Any) -> bool:
    return (
        isinstance(source, list | tuple)
        and len(source) > 0
        and all(isinstance(entry, str | os.PathLike) for entry in source)
    )
