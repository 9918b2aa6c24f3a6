"""Token counts in the files of numpy: `.npy` files, which are mapped, and `.npz` files."""

from __future__ import annotations

import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, NoReturn

import numpy as np

from tundish.errors import InvalidInputError, format_count
from tundish.packing.arguments import IntegerArray, as_integer_array
from tundish.packing.sources.columns import choose_column

__all__ = ["NpyFile", "NpzFile"]

_NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class _CountsFile:
    """A file of token counts alone."""

    path: Path

    def samples(self, column: str | None, columns: Sequence[str] | None) -> NoReturn:  # noqa: ARG002 (as other sources)
        raise InvalidInputError(
            f"{self.path}: holds token counts and no tokens; give PackedDataset the samples that were counted"
        )


class NpyFile(_CountsFile):
    """A `.npy` file with the token counts."""

    def lengths(self, column: str | None) -> IntegerArray:
        path = self.path
        if column is not None:
            raise InvalidInputError(
                f"{path}: is one array without columns, and column {column!r} was asked for"
            )
        # numpy takes any other file for a pickle, and its message does not name the file.
        with path.open("rb") as file:
            magic = file.read(len(_NPY_MAGIC))
        if magic != _NPY_MAGIC:
            raise InvalidInputError(f"{path}: not a .npy file; write the array with numpy.save")
        try:
            with warnings.catch_warnings():
                # The error that follows says the same.
                warnings.simplefilter("ignore")
                array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, TypeError, OverflowError, IndexError, SyntaxError, TokenError) as error:
            raise InvalidInputError(f"{path}: cannot be mapped: {error}") from error
        except (RecursionError, MemoryError) as error:
            # Python's parser gives up on a header of a thousand minus signs; its error names no file.
            raise InvalidInputError(f"{path}: cannot be mapped: its header is nested too deeply") from error
        # A copy in text mode adds a byte to the header, and shifts every number after it.
        behind = path.stat().st_size - array.offset - array.nbytes
        if behind > 0:
            raise InvalidInputError(
                f"{path}: holds {format_count(behind, 'byte')} more than the array in its header: it was changed after "
                "numpy.save wrote it; write it again"
            )
        # Checked here, where the message can name the file.
        return as_integer_array(array, str(path))


class NpzFile(_CountsFile):
    """A `.npz` file with the token counts as one of its arrays."""

    def lengths(self, column: str | None) -> IntegerArray:
        path = self.path
        if not zipfile.is_zipfile(path):
            raise InvalidInputError(f"{path}: not a .npz file; write the arrays with numpy.savez")
        try:
            with np.load(path, allow_pickle=False) as file:
                names = list(file.files)
                # The only array needs no name.
                chosen = names[0] if column is None and len(names) == 1 else None
                name = chosen or choose_column(names, column, ("length", "lengths"), str(path))
                array: Any = file[name]
        except InvalidInputError:
            raise
        except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise InvalidInputError(
                f"{path}: cannot be read as a .npz file: {error}; write it again with numpy.savez"
            ) from error
        return as_integer_array(array, f"{path}: array {name!r}")
