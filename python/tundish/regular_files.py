"""Opens regular files for reading, and nothing else.

Invariants:
- Opening never waits: a FIFO without a writer would block `open`, and a device may have no end.
- The type is checked on the open descriptor, so the file cannot be exchanged in between.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from tundish.errors import InvalidInputError, NotFoundError, StorageError

_TYPES = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class _NamedFile(io.FileIO):
    """An open file whose errors name it."""

    def __init__(self, descriptor: int, path: str, what: str) -> None:
        super().__init__(descriptor, "rb")
        self._path, self._what = path, what

    def readinto(self, buffer: Any) -> int:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise _unreadable(self._path, error, self._what) from error

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as error:
            raise _unreadable(self._path, error, self._what) from error


def open_regular_file(path: str | os.PathLike[str], what: str) -> BinaryIO:
    """Open a regular file for reading, as `open(path, "rb")` does.

    Args:
        path: The file. Links are followed.
        what: What the file should be, for messages, as in "a file with a token".

    Raises:
        InvalidInputError: `path` is a folder, a FIFO, a socket or a device, or cannot be a path.
        NotFoundError: Nothing has this path.
        StorageError: The file cannot be opened. Reading raises it, too.
    """
    name = os.fspath(path)
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer. It changes nothing for a regular file.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError as error:
        raise InvalidInputError(f"{name!r} is no path: {error}; give {what}") from error
    except OSError as error:
        if error.errno == errno.ENXIO:
            # A socket, or a device that nothing drives.
            raise _refused(name, Path(name).stat().st_mode, what) from error
        raise _unreadable(name, error, what) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _refused(name, mode, what)
        return io.BufferedReader(_NamedFile(descriptor, name, what))
    except BaseException:
        os.close(descriptor)
        raise


def read_regular_file(path: str | os.PathLike[str], what: str, limit_bytes: int) -> bytes:
    """Read a small regular file whole.

    Args:
        path: The file. Links are followed.
        what: What the file should be, for messages, as in "a file with a token".
        limit_bytes: The most bytes that such a file has.

    Raises:
        InvalidInputError: As for `open_regular_file`; or the file is larger than `limit_bytes`.
        NotFoundError: Nothing has this path.
        StorageError: The file cannot be opened or read.
    """
    with open_regular_file(path, what) as file:
        # Files of /proc have no size, and a file may grow meanwhile: the bytes count, not the size.
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise InvalidInputError(f"{os.fspath(path)}: has more than {limit_bytes} bytes; give {what}")
    return content


def _refused(name: str, mode: int, what: str) -> InvalidInputError:
    found = _TYPES.get(stat.S_IFMT(mode), "special file")
    return InvalidInputError(f"{name}: is a {found}; give {what}, as a regular file")


def _unreadable(name: str, error: OSError, what: str) -> StorageError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFoundError(error.errno, f"does not exist; give {what}", name)
    return StorageError(error.errno, f"cannot be read: {error.strerror}", name)
