"""Arrays in files, for arrays that are larger than memory.

A folder of arrays has a folder `array-<32 hexadecimal digits>` for each, with one file `array.npy`, which
`numpy.load(…, mmap_mode="r")` reads too. The digits are a hash of the array (its dtype, shape, order and bytes), or of
the key that stands for it.

Invariants:

- An array's folder is there whole and durable, or not at all. Its file is never changed or replaced.
- An array is read and written in pieces of `PIECE` bytes: no step needs more memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import math
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)

__all__ = ["FileBackedArray", "find_by_key", "keep"]

FILE = "array.npy"
PIECE = 16 << 20
# More threads would wait for memory, or for the disk.
HASHING_THREADS = 8


@dataclass(frozen=True, slots=True)
class FileBackedArray:
    """The place of an array in a file; small when it is pickled."""

    path: str
    inode: int

    def mapped(self) -> NDArray[Any]:
        """Map the array read-only.

        Raises:
            NotFoundError: the file is not there (any more).
            StorageError: it cannot be read, or is damaged, or another one lies under its name.
        """
        try:
            with _opened(self.path) as file:
                array, inode = _mapped(file)
        except FileNotFoundError as error:
            raise NotFoundError(
                error.errno,
                "is not there: a shared array lies in it; keep clean-up jobs away, and give a path that all processes "
                "of a node see under the same name",
                self.path,
            ) from error
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(error.errno, f"cannot be mapped: {error.strerror}", self.path) from error
        if inode != self.inode:
            raise StorageError(
                errno.ESTALE, "was replaced by another file since the array was shared from it", self.path
            )
        return array


def find_by_key(folder: Path, key: str) -> FileBackedArray | None:
    """Return the array that was kept in `folder` under `key`; None where there is none.

    Raises:
        StorageError: it is there, but damaged or unreadable.
    """
    return _found(_place(folder, _name_of_key(key)))


def keep(array: NDArray[Any], folder: Path, key: str | None) -> FileBackedArray:
    """Publish `array` in `folder`, which is made where it is missing, unless it lies there already.

    Args:
        array: any but of objects; read piece by piece, so that it may be a map of a file larger than memory.
        folder: where arrays are kept.
        key: what the array is found by; None for a hash of it.

    Raises:
        InvalidInputError: another array was kept under this key.
        AlreadyExistsError: something else lies there.
        StorageError: the file system refused.
    """
    _make_folder(folder)
    target = _place(folder, _content_of(array) if key is None else _name_of_key(key))
    found = _found(target)
    if found is None:
        # Another process may be faster.
        with contextlib.suppress(AlreadyExistsError):
            _publish(array, target)
        found = _found(target)
    if found is None:
        raise AlreadyExistsError(
            errno.EEXIST,
            f"holds no {FILE}, though it is named like an array of this folder; remove it, and the array is made",
            str(target),
        )
    if key is not None:
        # Another node, or another job, may have brought it.
        _check_same_kind(found.mapped(), array, key, folder)
    return found


def _check_same_kind(kept: NDArray[Any], array: NDArray[Any], key: str, folder: Path) -> None:
    if (kept.dtype, kept.shape) != (array.dtype, array.shape):
        raise InvalidInputError(
            f"key {key!r} stands for an array of dtype {kept.dtype} and shape {kept.shape} in {folder}, and the one "
            f"brought now is of dtype {array.dtype} and shape {array.shape}: give other content another key"
        )


def _place(folder: Path, name: str) -> Path:
    return folder / f"array-{name}"


def _name_of_key(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"tundish key").hexdigest()


def _content_of(array: NDArray[Any]) -> str:
    """A hash of dtype, shape, order and bytes: that of the header of the file and of the hashes of its pieces."""
    threads = min(os.cpu_count() or 1, HASHING_THREADS)
    content = hashlib.blake2b(_header(array), digest_size=16, person=b"tundish array")
    pieces = _pieces(array)
    with ThreadPoolExecutor(threads) as pool:
        # Not all at once: pieces of an array with gaps are copies.
        while some := list(itertools.islice(pieces, 2 * threads)):
            for digest in pool.map(_digest, some):
                content.update(digest)
    return content.hexdigest()


def _digest(piece: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(piece.data, digest_size=32).digest()


def _header(array: NDArray[Any]) -> bytes:
    header = io.BytesIO()
    try:
        facts = npy.header_data_from_array_1_0(array)
    except ValueError as error:
        raise InvalidInputError(
            f"dtype {array.dtype} cannot be written to a file, whose fields lie one after the other: bring "
            "numpy.lib.recfunctions.repack_fields(array)"
        ) from error
    try:
        npy.write_array_header_1_0(header, facts)
    except ValueError:
        header = io.BytesIO()
        try:
            npy.write_array_header_2_0(header, facts)
        except ValueError as error:
            raise InvalidInputError(f"dtype {array.dtype} cannot be written to a file: {error}") from error
    return header.getvalue()


def _pieces(array: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of `array` as they lie in its file, cut at the same places however the array lies in memory."""
    array = np.asarray(array)
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        array = array.T
    # A slice of this iterator is a copy of one piece.
    entries = array.reshape(-1) if array.flags.c_contiguous else array.flat
    step = max(1, PIECE // max(1, array.itemsize))
    for start in range(0, array.size, step):
        yield entries[start : start + step].view(np.uint8)


def _publish(array: NDArray[Any], target: Path) -> None:
    writing = _native.NewFolder(target)
    try:
        writing.append(FILE, _header(array))
        for piece in _pieces(array):
            writing.append(FILE, piece)
        writing.publish()
    finally:
        writing.abandon()


def _found(target: Path) -> FileBackedArray | None:
    path = target / FILE
    try:
        with _opened(path) as file:
            _, inode = _mapped(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error
    return FileBackedArray(str(path), inode)


def _opened(path: str | Path) -> BinaryIO:
    # Without the flag, opening a pipe would wait for a writer.
    return open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def _mapped(file: BinaryIO) -> tuple[NDArray[Any], int]:
    """The array in `file`, and the file's inode number."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise _damaged(file, "it is no plain file")
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file, max_header_size=1 << 20)
        if dtype.hasobject:
            # Entries of objects are addresses.
            raise ValueError(f"its dtype is {dtype}, and no file holds Python objects")
        offset, order = file.tell(), "F" if is_fortran else "C"
        nbytes = math.prod(shape) * dtype.itemsize
        if status.st_size != offset + nbytes:
            raise ValueError(f"its header asks for {offset + nbytes} bytes and it has {status.st_size}")
        if nbytes:
            array: NDArray[Any] = np.memmap(file, dtype, "r", offset, shape, order)  # type: ignore[call-overload]
        else:
            array = np.empty(shape, dtype, order)  # type: ignore[call-overload]
            array.flags.writeable = False
    except (ValueError, TypeError, EOFError, TokenError, MemoryError, RecursionError) as error:
        raise _damaged(file, str(error)) from error
    return array, status.st_ino


def _damaged(file: BinaryIO, reason: str) -> StorageError:
    return StorageError(
        errno.EIO, f"is damaged ({reason}): remove its folder, and the array is made again", str(file.name)
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise AlreadyExistsError(
            error.errno, "is not a folder, so no arrays can be kept in it", str(folder)
        ) from error
    except OSError as error:
        raise StorageError(error.errno, f"cannot be made: {error.strerror}", str(folder)) from error
