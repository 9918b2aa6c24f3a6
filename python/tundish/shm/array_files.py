"""Arrays in files, for arrays that are larger than memory.

Each array has a folder `array-<32 hexadecimal digits>` with one file `array.npy`, which `numpy.load(…, mmap_mode="r")`
reads too. The digits are a hash of the key, or of the array: its dtype, shape, order and bytes.

Invariants:

- The folder of an array appears whole and durable. Its file is never changed or replaced.
- An array is hashed and written in chunks of `CHUNK_BYTES` bytes, so it may be larger than memory.
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

__all__ = ["ArrayFile", "find_by_key", "publish_array"]

FILE = "array.npy"
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """The path of an array's file; small when pickled."""

    path: str
    inode: int

    def read_only(self) -> NDArray[Any]:
        """Map the array read-only.

        Raises:
            NotFoundError: the file does not exist any more.
            StorageError: the file cannot be read, is damaged, or was replaced.
        """
        try:
            array, inode = _mapped(self.path)
        except FileNotFoundError as error:
            raise NotFoundError(
                error.errno,
                f"{self.path} does not exist, but an array was shared from it: keep clean-up jobs away, and give a "
                "path that is the same in all processes of a node",
                self.path,
            ) from error
        if inode != self.inode:
            raise StorageError(
                errno.ESTALE,
                f"{self.path} was replaced after an array was shared from it: share the array again",
                self.path,
            )
        return array


def find_by_key(folder: Path, key: str) -> ArrayFile | None:
    """Return the array that was published in `folder` under `key`; None if there is none.

    Raises:
        StorageError: the file is damaged or unreadable.
    """
    return _find(_folder_of_key(folder, key))


def publish_array(array: NDArray[Any], layout: ArrayLayout, folder: Path, key: str | None) -> ArrayFile:
    """Publish `array` in `folder`, unless it is there already.

    Args:
        array: numpy array; it may be a memory map of a file that is larger than memory.
        layout: layout of `array`.
        folder: folder of arrays, made if it is missing; its parent must exist.
        key: key by which the array is found; None for a hash of the array.

    Raises:
        InvalidInputError: the key belongs to an array of another dtype or shape.
        NotFoundError: the parent of `folder` does not exist.
        StorageError: the file cannot be written, or another file has its name.
    """
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise NotFoundError(
            error.errno,
            f"{folder} cannot be made, since {folder.parent} does not exist: make that first",
            str(folder),
        ) from error
    except OSError as error:
        raise StorageError(
            error.errno, f"{folder} cannot be made as a folder of arrays: {error.strerror}", str(folder)
        ) from error
    target = folder / f"array-{_content_hash(array, layout)}" if key is None else _folder_of_key(folder, key)
    found = _find(target)
    if found is None:
        try:
            _publish(array, layout, target)
        except AlreadyExistsError:
            # Another process was faster, or another file has the name.
            if _find(target) is None:
                raise
        found = _find(target)
    if found is None:
        raise StorageError(
            errno.ENOENT,
            f"{target} was removed right after it was written: keep clean-up jobs away from {folder}",
            str(target),
        )
    present = found.read_only()
    if (present.dtype, present.shape) != (array.dtype, array.shape):
        raise InvalidInputError(
            f"key {key!r} belongs to an array of dtype {present.dtype} and shape {present.shape} in {folder}, and this "
            f"array has dtype {array.dtype} and shape {array.shape}: give other content another key"
        )
    return found


def _folder_of_key(folder: Path, key: str) -> Path:
    digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16, person=b"tundish key")
    return folder / f"array-{digest.hexdigest()}"


def _content_hash(array: NDArray[Any], layout: ArrayLayout) -> str:
    """Return a hash of dtype, shape, order and bytes."""
    content = hashlib.blake2b(_header(layout), digest_size=16, person=b"tundish array")
    for chunk in _chunks(array, layout):
        content.update(chunk)
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


def _chunks(array: NDArray[Any], layout: ArrayLayout) -> Iterator[bytes]:
    """Yield the bytes of `array` in the order of its file."""
    chunks: Any = np.nditer(
        array,
        flags=["external_loop", "buffered", "zerosize_ok"],
        buffersize=max(1, CHUNK_BYTES // max(1, array.itemsize)),
        order=layout.order,
    )
    for chunk in chunks:
        yield chunk.tobytes()


def _publish(array: NDArray[Any], layout: ArrayLayout, target: Path) -> None:
    writing = _native.AtomicFolder(target)
    try:
        writing.append(FILE, _header(layout))
        for chunk in _chunks(array, layout):
            writing.append(FILE, chunk)
        writing.publish()
    finally:
        writing.abandon()


def _find(target: Path) -> ArrayFile | None:
    path = str(target / FILE)
    try:
        _, inode = _mapped(path)
    except FileNotFoundError:
        return None
    return ArrayFile(path, inode)


def _mapped(path: str) -> tuple[NDArray[Any], int]:
    """Return the array in a file, and the file's inode number."""
    try:
        inode = Path(path).stat().st_ino
        return npy.open_memmap(path, "r"), inode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"{path} cannot be mapped: {error.strerror}", path) from error
    except Exception as error:
        raise StorageError(
            errno.EIO, f"{path} is damaged ({error}): remove its folder, and the array is built again", path
        ) from error
