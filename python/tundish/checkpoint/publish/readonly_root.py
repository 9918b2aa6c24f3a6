"""Lists, verifies and read-locks the published checkpoints of a root, without the writer lock and without torch.

A read lock keeps the writer from removing or replacing a checkpoint. Where the file system has no locks, a warning
says so.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish import _native
from tundish.checkpoint.publish.kinds_and_steps import Kind, check_kind, check_step, plain_step
from tundish.checkpoint.publish.retention import Checkpoint
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, StorageError, format_count

__all__ = [
    "MANIFEST",
    "Checkpoints",
    "Damaged",
    "ReadonlyRoot",
    "checkpoints_of",
    "open_readonly",
    "releasing",
    "verify",
]

_logger = logging.getLogger("tundish.checkpoint")

MANIFEST = "tundish.json"

Checkpoints = list[Checkpoint]  # classes below have a method called list


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A folder with the name of a checkpoint that is not a whole checkpoint.

    Attributes:
        reason: why it is not.
    """

    kind: str
    step: int
    path: Path
    reason: str


_Damaged = list[Damaged]
_Names = list[str]


def checkpoints_of(entries: _native._Checkpoints, kind: Kind | None) -> Checkpoints:
    """The checkpoints that a root lists, of one kind or of all."""
    return [
        Checkpoint(
            kind=entry["kind"],
            step=entry["step"],
            path=entry["path"],
            tag=entry["tag"],
            size=entry["bytes"],
            files=entry["files"],
            # Loading reports anything else as an error.
            extra=entry["extra"] if isinstance(entry["extra"], dict) else {},
        )
        for entry in entries
        if kind is None or entry["kind"] == kind
    ]


@contextlib.contextmanager
def releasing(lock: _native.CheckpointReadLock) -> Iterator[_native.CheckpointReadLock]:
    """Release `lock` after the block; warn where the file system has no locks."""
    try:
        if not lock.is_locked:
            _warn_without_locks(lock.path.parent)
        yield lock
    finally:
        lock.close()


@functools.cache
def _warn_without_locks(root: Path) -> None:
    _logger.warning(
        "the file system of %s has no locks: a checkpoint may be removed while it is read",
        root,
    )


def path_of(given: Any, name: str) -> Path:
    """The absolute path of the argument `name`."""
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise InvalidTypeError(f"{name} is {given!r}: give the path of a folder, as text")
    text = os.fspath(given)
    if not text or "\0" in text:
        raise InvalidInputError(f"{name} is {text!r}, which names no folder: '.' is the current one")
    return Path(given).absolute()


def is_file(path: Path) -> bool:
    """Whether a file is there.

    Raises `StorageError` if that is unknown: in a folder without permission, or for a name that is too long.
    """
    try:
        return path.is_file()
    except OSError as error:
        raise StorageError(
            error.errno or errno.EIO, f"cannot be examined ({error.strerror})", str(path)
        ) from None


def check_root(path: Path) -> None:
    """Refuse a folder that is itself a checkpoint, with an `InvalidInputError` that names its root."""
    if is_file(path / MANIFEST):
        folder = path.resolve()
        raise InvalidInputError(
            f"{path} is itself a checkpoint: give {folder.parent}, the root that {folder.name} lies in"
        )


def verify(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[str, int, int], object] | None = None,
    warns: bool = True,
) -> list[str]:
    """Read every byte of a checkpoint again and compare it with what was recorded when it was saved.

    Until it has returned, the checkpoint is neither removed nor replaced.

    Args:
        path: of the checkpoint.
        progress: called with "verify", the bytes read and the bytes in total.
        warns: whether to log a warning about files without a checksum.

    Returns:
        The names of the files that were saved without a checksum (`checksum=None`): only their sizes were compared.

    Raises:
        CorruptCheckpointError: names all files that are missing, changed, cut short or too many.
        NotFoundError: there is no checkpoint (any more).

    Example:
        >>> import torch
        >>> import tundish as td
        >>> with td.Checkpointer("verified") as checkpointer:
        ...     save = checkpointer.save_hf(1, {"w": torch.ones(2)})
        >>> td.checkpoint.verify(save.result())
        []
    """
    folder = path_of(path, "path")
    unsummed = _native.verify_checkpoint(folder, progress=progress)
    if warns:
        warn_without_checksums(folder, unsummed)
    return unsummed


def warn_without_checksums(folder: Path, unsummed: Sequence[str]) -> None:
    """Warn of files without a checksum, which a verification could not compare."""
    if unsummed:
        _logger.warning(
            "%s: no checksum of %s was recorded (checksum=None): only the sizes were compared, and changed bytes were "
            "not noticed",
            folder,
            format_count(len(unsummed), "file"),
        )


class ReadonlyRoot:
    """The checkpoints under a root, for watchers and evaluators. Made by `open_readonly`; a `Checkpointer` is one too.

    Attributes:
        path: the folder of all checkpoints.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.path = path_of(root, "root")
        check_root(self.path)
        try:
            self._root = _native.open_checkpoints_readonly(self.path)
        except NotFoundError as error:
            raise NotFoundError(
                error.errno, f"{self.path} does not exist: give the root of a Checkpointer", str(self.path)
            ) from None

    def _raise_pending(self) -> None:
        """Called first by every method: a `Checkpointer` raises the error of an earlier save here."""

    def list(self, kind: Kind | None = None) -> Checkpoints:
        """All published checkpoints, or those of one kind.

        Args:
            kind: "hf" or "dcp"; None lists both.

        Returns:
            A `Checkpoint` for each: first those of kind "hf", then "dcp", each by step.

        Raises:
            InvalidInputError: `kind` is another text.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("listed") as checkpointer:
            ...     save = checkpointer.save_hf(1, {"w": torch.ones(2)})
            >>> [checkpoint.step for checkpoint in td.checkpoint.open_readonly("listed").list()]
            [1]
        """
        self._raise_pending()
        return checkpoints_of(self._root.list(), None if kind is None else check_kind(kind))

    def survey(self, kind: Kind | None = None) -> tuple[Checkpoints, _Damaged]:
        """List the published checkpoints, and the damaged ones.

        Args:
            kind: "hf" or "dcp"; None lists both.

        Returns:
            What `list` returns, and in the same order the folders that are named like checkpoints and are none.

        Raises:
            InvalidInputError: `kind` is another text.

        Example:
            >>> import tundish as td
            >>> with td.Checkpointer("surveyed"):
            ...     td.checkpoint.open_readonly("surveyed").survey()
            ([], [])
        """
        self._raise_pending()
        only = None if kind is None else check_kind(kind)
        whole, damaged = self._root.survey()
        return checkpoints_of(whole, only), [
            Damaged(**entry) for entry in damaged if only is None or entry["kind"] == only
        ]

    def latest(self, kind: Kind = "hf") -> Path | None:
        """The newest published checkpoint of `kind`.

        Args:
            kind: "hf" or "dcp".

        Returns:
            Its path; None if there is no checkpoint.

        Raises:
            InvalidInputError: `kind` is another text.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("newest") as checkpointer:
            ...     save = checkpointer.save_hf(1, {"w": torch.ones(2)})
            >>> td.checkpoint.open_readonly("newest").latest().name
            'hf-1'
        """
        self._raise_pending()
        return self._root.latest(check_kind(kind))

    def verify(self, path: str | os.PathLike[str]) -> _Names:
        """Read every byte of a checkpoint again, as `tundish.checkpoint.verify` does.

        Args:
            path: of the checkpoint; a relative path is one under the root.

        Returns:
            The names of the files without a checksum: only their sizes were compared.

        Raises:
            CorruptCheckpointError: names all files that are missing, changed, cut short or too many.
            NotFoundError: there is no checkpoint.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("verified") as checkpointer:
            ...     save = checkpointer.save_hf(1, {"w": torch.ones(2)})
            >>> td.checkpoint.open_readonly("verified").verify("hf-1")
            []
        """
        self._raise_pending()
        # Whether it is one, before it is joined to the root.
        path_of(path, "path")
        return verify(self.path / path)

    @contextlib.contextmanager
    def reading(self, step: int, kind: Kind = "hf") -> Iterator[Path]:
        """Keep the checkpoint of `step` from being removed or replaced while the block reads it.

        Args:
            step: of the checkpoint.
            kind: "hf" or "dcp".

        Yields:
            Its path.

        Raises:
            NotFoundError: it is not there, or no longer.
            InvalidInputError: `step` or `kind` cannot be one.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("read") as checkpointer:
            ...     save = checkpointer.save_hf(1, {"w": torch.ones(2)})
            >>> with td.checkpoint.open_readonly("read").reading(1) as path:
            ...     (path / "model.safetensors").exists()
            True
        """
        self._raise_pending()
        with releasing(self._root.read_lock(check_kind(kind), check_step(plain_step(step)))) as lock:
            yield lock.path


def open_readonly(root: str | os.PathLike[str]) -> ReadonlyRoot:
    """Open a root to read its checkpoints: no lock, no collective, no repair.

    Args:
        root: the folder of all checkpoints.

    Returns:
        The root, to list, verify and read its checkpoints.

    Raises:
        NotFoundError: it does not exist.
        InvalidInputError: it is itself a checkpoint.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> with td.Checkpointer("opened") as checkpointer:
        ...     save = checkpointer.save_hf(1, {"w": torch.ones(2)})
        >>> td.checkpoint.open_readonly("opened").latest().name
        'hf-1'
    """
    return ReadonlyRoot(root)
