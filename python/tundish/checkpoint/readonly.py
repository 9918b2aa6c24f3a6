"""`ReadonlyRoot`: lists, verifies and read-locks the published checkpoints of a root, without torch or any change.

A read lock keeps the writer from removing or replacing a checkpoint. Where the file system has no locks, a warning
says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tundish import _native
from tundish.checkpoint.root import (
    Checkpoint,
    Checkpoints,
    Damaged,
    DamagedOnes,
    DiskRoot,
    Kind,
    Root,
    check_kind,
    check_step,
    name_of,
    path_of,
    plain_step,
)
from tundish.errors import NotFoundError, format_count

_logger = logging.getLogger("tundish.checkpoint")


_Names = list[str]
C = TypeVar("C", Checkpoint, Damaged)


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
        reader: the root.
    """

    def __init__(self, root: str | os.PathLike[str] | Root) -> None:
        self.reader: Root = root if isinstance(root, Root) else _existing(path_of(root, "root"))
        self.path = self.reader.path

    def __repr__(self) -> str:
        return f"<ReadonlyRoot {self.path}>"

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
        return _of_kind(self.reader.list(), kind)

    def survey(self, kind: Kind | None = None) -> tuple[Checkpoints, DamagedOnes]:
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
        whole, damaged = self.reader.survey()
        return _of_kind(whole, kind), _of_kind(damaged, kind)

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
        return self.reader.latest(check_kind(kind))

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
        folder = self.path / path
        if folder.parent != self.path:
            return verify(folder)
        unsummed = list(self.reader.verify(folder.name))
        warn_without_checksums(folder, unsummed)
        return unsummed

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
        with self.reader.lock(name_of(check_kind(kind), check_step(plain_step(step)))) as published:
            yield published.path


def _of_kind(found: list[C], kind: Kind | None) -> list[C]:
    """The checkpoints of one kind; None takes all."""
    only = None if kind is None else check_kind(kind)
    return [one for one in found if only is None or one.kind == only]


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


def _existing(path: Path) -> DiskRoot:
    root = DiskRoot(path)
    try:
        root.latest("hf")
    except NotFoundError as error:
        raise NotFoundError(
            error.errno, f"{path} does not exist: give the root of a Checkpointer", str(path)
        ) from None
    return root
