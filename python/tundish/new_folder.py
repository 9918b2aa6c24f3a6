"""`NewFolder`: a folder that is written file by file, and appears whole and durable, or not at all."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tundish import _native

# Small writes are joined to pieces of this size.
_BUFFER_BYTES = 1 << 20


class NewFolder:
    """A context manager that publishes the folder `path` when its block ends without an error.

    Raises:
        AlreadyExistsError: Something lies at `path`.
        NotFoundError: Its parent does not exist.
        StorageError: The file system refused, or is full.
    """

    def __init__(self, path: Path) -> None:
        self._folder = _native.AtomicFolder(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._folder.publish()
        else:
            self._folder.abandon()

    def write_json(self, name: str, value: Any) -> None:
        """Write a file with `value` as JSON."""
        self._folder.append(name, (json.dumps(value, indent=2) + "\n").encode())

    def begin_array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Begin a `.npy` file of this shape, whose entries `append` adds."""
        header = io.BytesIO()
        fields = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(header, fields)
        self._folder.append(name, header.getvalue())

    def append(self, name: str, entries: NDArray[Any]) -> None:
        """Append entries of the array's dtype to a `.npy` file."""
        if entries.size:
            self._folder.append(name, np.ascontiguousarray(entries).reshape(-1).view(np.uint8))

    def write_array(self, name: str, array: NDArray[Any]) -> None:
        """Write a whole `.npy` file."""
        self.begin_array(name, array.dtype, array.shape)
        self.append(name, array)

    def open(self, name: str) -> io.BufferedWriter:
        """Open a new file to be written from its start to its end, and closed."""
        return io.BufferedWriter(_NewFile(self._folder, name), _BUFFER_BYTES)


class _NewFile(io.RawIOBase):
    def __init__(self, folder: _native.AtomicFolder, name: str) -> None:
        super().__init__()
        self._folder = folder
        self._name = name

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        contents = bytes(data)
        self._folder.append(self._name, contents)
        return len(contents)
