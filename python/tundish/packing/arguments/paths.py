"""Paths as arguments."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError

__all__ = ["as_absolute", "as_new_folder", "as_path"]


def as_path(path: Any, name: str) -> Path:
    """`path`, which must be one that a file or folder can have."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise InvalidTypeError(f"{name} is {path!r}: give a path, as a non-empty str or a pathlib.Path")
    try:
        named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        named = False
    if not named:
        raise InvalidInputError(
            f"{name} is {os.fspath(path)!r}; no path can hold a null character, or one that cannot be encoded"
        )
    return Path(path)


def as_absolute(path: Any, name: str) -> Path:
    """The absolute form of `path`, which must be one that a folder can have."""
    folder = as_path(path, name)
    try:
        return folder.absolute()
    except FileNotFoundError as error:
        raise NotFoundError(
            error.errno, f"{name} is relative, and the current folder was removed", str(folder)
        ) from error


def as_new_folder(path: Any, name: str) -> Path:
    """The absolute path of a folder to be made, which cannot be the current one."""
    folder = as_absolute(path, name)
    # A current folder that was removed is no folder to be made either.
    with contextlib.suppress(FileNotFoundError):
        if Path(os.path.normpath(folder)) == Path.cwd():
            raise InvalidInputError(f"{name} is {str(path)!r}, the current folder; name a folder to be made")
    return folder
