"""The indexed datasets of Megatron-LM: token counts in a `.idx` file, tokens in a `.bin` file. Both are mapped.

A `.idx` file is a header, then three arrays: the token count of each sequence (int32), the byte of the `.bin` file at
which each begins (int64), and the first sequence of each document (int64). The last ends with the number of sequences.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError
from tundish.packing.arguments import IntegerArray
from tundish.packing.sources.source import SampleRows, choose_column, narrowed
from tundish.regular_files import open_regular_file

_MAGIC = b"MMIDIDX\x00\x00"
# Magic, version, dtype, sequences, entries of the document array.
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_SEQUENCES, _DOCUMENTS = "sequences", "documents"
_UNITS = (_SEQUENCES, _DOCUMENTS)


class MegatronFile(NamedTuple):
    """A `.idx` file and the `.bin` file beside it. The columns are "sequences", the default, and "documents"."""

    path: Path

    def lengths(self, column: str | None) -> IntegerArray:
        unit = choose_column(_UNITS, column, (_SEQUENCES,), str(self.path))
        index = _Index.map(self.path)
        if unit == _SEQUENCES:
            return index.lengths
        return narrowed(np.diff(_token_bounds(index)))

    def samples(self, column: str | None, columns: Sequence[str] | None) -> MegatronSamples:
        unit = choose_column(_UNITS, column, (_SEQUENCES,), str(self.path))
        if columns:
            raise InvalidInputError(
                f"{self.path}: an indexed dataset holds tokens alone, and columns is {list(columns)!r}"
            )
        return MegatronSamples(self.path, unit)


class MegatronSamples(SampleRows):
    """The sequences or the documents of an indexed dataset, each a view of the mapped `.bin` file.

    Args:
        path: The `.idx` file.
        unit: "sequences" or "documents".
    """

    def __init__(self, path: Path, unit: str) -> None:
        self._origin = path, unit
        index = _Index.map(path)
        if index.dtype.kind not in "iu":
            raise InvalidInputError(f"{path}: holds {index.dtype.name}, and tokens are integers")
        _check_pointers(path, index)
        starts = index.pointers
        self._lengths = index.lengths
        if unit == _DOCUMENTS:
            bounds = _token_bounds(index)
            starts, self._lengths = bounds[:-1] * index.dtype.itemsize, np.diff(bounds)
            if len(index.pointers):
                starts = starts + index.pointers[0]
        self._starts = starts
        needed = int(starts[-1]) + int(self._lengths[-1]) * index.dtype.itemsize if len(starts) else 0
        tokens = path.with_suffix(".bin")
        with open_regular_file(tokens, f"the tokens ({path} is its index)") as file:
            size = os.fstat(file.fileno()).st_size
        if size < needed:
            raise InvalidInputError(
                f"{tokens}: holds {size} bytes, and {path} needs {needed}; write both again"
            )
        count = size // index.dtype.itemsize
        self._tokens: NDArray[Any] = np.empty(0, dtype=index.dtype)
        if count:
            # A plain view: slices of a memory map of numpy are slow.
            self._tokens = np.memmap(tokens, dtype=index.dtype, mode="r", shape=(count,)).view(np.ndarray)

    def __len__(self) -> int:
        return len(self._lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return MegatronSamples, self._origin

    def _read(self, number: int) -> NDArray[Any]:
        start = int(self._starts[number]) // self._tokens.itemsize
        return self._tokens[start : start + int(self._lengths[number])]


class _Index(NamedTuple):
    """A mapped `.idx` file.

    Attributes:
        dtype: What the tokens are.
        lengths: Tokens of each sequence, int32, (sequences,).
        pointers: First byte of each sequence in the `.bin` file, int64, (sequences,).
        documents: First sequence of each document, then the number of sequences, int64.
    """

    dtype: np.dtype[Any]
    lengths: IntegerArray
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]

    @classmethod
    def map(cls, path: Path) -> _Index:
        """Map the file and check that its arrays are as long as its header says.

        Raises:
            InvalidInputError: The file is no index, or of another version, or truncated.
        """
        with open_regular_file(path, "the .idx file of an indexed dataset") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise InvalidInputError(
                f"{path}: not an index of Megatron-LM, which begins with MMIDIDX; write it with its preprocess_data.py"
            )
        _, version, code, sequences, documents = _HEADER.unpack(header)
        if version != _VERSION or code not in _DTYPES:
            raise InvalidInputError(
                f"{path}: has version {version} and dtype {code}; version {_VERSION} is supported"
            )
        needed = _HEADER.size + 12 * sequences + 8 * documents
        size = path.stat().st_size
        if size < needed:
            raise InvalidInputError(
                f"{path}: holds {size} bytes, and its header asks for {needed}; write it again"
            )

        def array(dtype: str, offset: int, count: int) -> Any:
            if not count:
                return np.empty(0, dtype=dtype)
            return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))

        index = cls(
            dtype=np.dtype(_DTYPES[code]),
            lengths=array("<i4", _HEADER.size, sequences),
            pointers=array("<i8", _HEADER.size + 4 * sequences, sequences),
            documents=array("<i8", _HEADER.size + 12 * sequences, documents),
        )
        index.check(path)
        return index

    def check(self, path: Path) -> None:
        """Refuse lengths below 0 and documents that are not in order."""
        if len(self.lengths) and self.lengths.min() < 0:
            sequence = int(np.argmax(self.lengths < 0))
            raise InvalidInputError(
                f"{path}: sequence {sequence} has {self.lengths[sequence]} tokens: the file is damaged, write it again"
            )
        bounds = self.documents
        expected = len(bounds) and (bounds[0], bounds[-1]) == (0, len(self.lengths))
        is_empty = not len(bounds) and not len(self.lengths)
        if not is_empty and (not expected or (np.diff(bounds) < 0).any()):
            raise InvalidInputError(
                f"{path}: its documents do not go from sequence 0 to {len(self.lengths)}: the file is damaged, write "
                "it again"
            )


def _token_bounds(index: _Index) -> NDArray[np.int64]:
    """The first token of each document, then the number of tokens, counted through all sequences."""
    if not len(index.documents):
        return np.zeros(1, dtype=np.int64)
    bounds = np.zeros(len(index.lengths) + 1, dtype=np.int64)
    np.cumsum(index.lengths, out=bounds[1:])
    return bounds[index.documents]


def _check_pointers(path: Path, index: _Index) -> None:
    """Refuse sequences that do not lie one after the other in the `.bin` file."""
    itemsize = index.dtype.itemsize
    ends = index.pointers + index.lengths * np.int64(itemsize)
    apart = index.pointers[1:] != ends[:-1]
    if len(index.pointers) and (index.pointers[0] < 0 or index.pointers[0] % itemsize or apart.any()):
        sequence = int(np.argmax(apart)) + 1 if apart.any() else 0
        raise InvalidInputError(
            f"{path}: sequence {sequence} does not begin where the one before it ends: the file is damaged, write it "
            "again"
        )
