"""Arrays in files, for arrays that are larger than memory.

Each array has a folder `array-<32 hexadecimal digits>` with one file `array.npy`, which `numpy.load(…, mmap_mode="r")`
reads too. The digits are a hash of the array (its dtype, shape, order and bytes), or of its key.

Invariants:

- An array's folder is there whole and durable, or not at all. Its file is never changed or replaced.
- An array is read and written in pieces of `PIECE` bytes: no step needs more memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import AlreadyExistsError, InvalidInputError, NotFoundError, StorageError
from tundish.shm.array_layout import ArrayLayout

__all__ = ["FileBackedArray", "find_by_key", "keep"]

FILE = "array.npy"
PIECE = 16 << 20


@dataclass(frozen=True, slots=True)
class FileBackedArray:
    """The place of an array in a file; small when it is pickled."""

    path: str
    inode: int

    def read_only(self) -> NDArray[Any]:
        """Map the array read-only.

        Raises:
            NotFoundError: the file is not there (any more).
            StorageError: the file cannot be read, is damaged, or was replaced by another one.
        """
        try:
            array, inode = _mapped(self.path)
        except FileNotFoundError as error:
            raise NotFoundError(
                error.errno,
                "is not there: a shared array lies in it; keep clean-up jobs away, and give a path that all processes "
                "of a node see under the same name",
                self.path,
            ) from error
        if inode != self.inode:
            raise StorageError(
                errno.ESTALE, "was replaced by another file since the array was shared from it", self.path
            )
        return array


def find_by_key(folder: Path, key: str) -> FileBackedArray | None:
    """Return the array that was kept in `folder` under `key`; None if there is none.

    Raises:
        StorageError: it is there, but damaged or unreadable.
    """
    return _found(_place_of_key(folder, key))


def keep(array: NDArray[Any], layout: ArrayLayout, folder: Path, key: str | None) -> FileBackedArray:
    """Publish `array` in `folder`, unless it lies there already.

    Args:
        array: numpy array; it may be a map of a file larger than memory.
        layout: layout of `array`.
        folder: folder of arrays, created if it is missing.
        key: key by which the array is found; None for a hash of the array.

    Raises:
        InvalidInputError: another array was kept under this key.
        StorageError: the file system refused, or something else lies there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot be made, so no arrays can be kept in it: {error.strerror}", str(folder)
        ) from error
    target = folder / f"array-{_content_of(array, layout)}" if key is None else _place_of_key(folder, key)
    found = _found(target)
    if found is None:
        try:
            _publish(array, layout, target)
        except AlreadyExistsError:
            # Another process was faster, or something else lies there.
            if _found(target) is None:
                raise
        found = _found(target)
    if found is None:
        raise StorageError(errno.ENOENT, "was removed as soon as it was written", str(target))
    kept = found.read_only()
    if (kept.dtype, kept.shape) != (array.dtype, array.shape):
        raise InvalidInputError(
            f"key {key!r} stands for an array of dtype {kept.dtype} and shape {kept.shape} in {folder}, and the one "
            f"brought now is of dtype {array.dtype} and shape {array.shape}: give other content another key"
        )
    return found


def _place_of_key(folder: Path, key: str) -> Path:
    digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16, person=b"tundish key")
    return folder / f"array-{digest.hexdigest()}"


def _content_of(array: NDArray[Any], layout: ArrayLayout) -> str:
    """A hash of dtype, shape, order and bytes."""
    content = hashlib.blake2b(_header(layout), digest_size=16, person=b"tundish array")
    for piece in _pieces(array, layout):
        content.update(piece)
    return content.hexdigest()


def _header(layout: ArrayLayout) -> bytes:
    header = io.BytesIO()
    is_fortran = layout.order == "F"
    descr = npy.dtype_to_descr(layout.dtype)
    try:
        npy.write_array_header_2_0(
            header, {"descr": descr, "fortran_order": is_fortran, "shape": layout.shape}
        )
    except ValueError as error:
        raise InvalidInputError(f"dtype {layout.dtype} cannot be written to a file: {error}") from error
    return header.getvalue()


def _pieces(array: NDArray[Any], layout: ArrayLayout) -> Iterator[bytes]:
    """The bytes of `array` as they lie in its file."""
    pieces: Any = np.nditer(
        array,
        flags=["external_loop", "buffered", "zerosize_ok"],
        buffersize=max(1, PIECE // max(1, array.itemsize)),
        order=layout.order,
    )
    for piece in pieces:
        yield piece.tobytes()


def _publish(array: NDArray[Any], layout: ArrayLayout, target: Path) -> None:
    writing = _native.NewFolder(target)
    try:
        writing.append(FILE, _header(layout))
        for piece in _pieces(array, layout):
            writing.append(FILE, piece)
        writing.publish()
    finally:
        writing.abandon()


def _found(target: Path) -> FileBackedArray | None:
    path = str(target / FILE)
    try:
        _, inode = _mapped(path)
    except FileNotFoundError:
        return None
    return FileBackedArray(path, inode)


def _mapped(path: str) -> tuple[NDArray[Any], int]:
    """The array in a file, and the file's inode number."""
    try:
        inode = Path(path).stat().st_ino
        return npy.open_memmap(path, "r"), inode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"cannot be mapped: {error.strerror}", path) from error
    except Exception as error:
        raise StorageError(
            errno.EIO, f"is damaged ({error}): remove its folder, and the array is made again", path
        ) from error
