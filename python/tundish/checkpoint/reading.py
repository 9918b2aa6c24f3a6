"""The checkpoints of a root as anybody may read them: without a lock, without a collective, without changing it.

What always holds: only published checkpoints are shown, and a read lock taken here keeps the owner from pruning
one while it is being read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

from tundish import _native
from tundish.checkpoint.retention import Checkpoint
from tundish.errors import InvalidInputError, NotFoundError

__all__ = ["KINDS", "Checkpoints", "Kind", "ReadOnlyRoot", "checkpoints_of", "open_readonly", "verify"]

Kind = Literal["hf", "dcp"]
KINDS: tuple[Kind, ...] = ("hf", "dcp")


Checkpoints = list[Checkpoint]  # classes below have a method called list


class _Listing(Protocol):
    def list(self) -> _native._Checkpoints: ...


def checkpoints_of(root: _Listing, kind: Kind | None) -> Checkpoints:
    """What `root` lists, of one kind or of all, by step."""
    return [
        Checkpoint(
            kind=entry["kind"],
            step=entry["step"],
            path=Path(entry["path"]),
            tag=entry["tag"],
            size=entry["bytes"],
            extra=entry["extra"] or {},
        )
        for entry in root.list()
        if kind is None or entry["kind"] == kind
    ]


def check_kind(kind: object) -> Kind:
    """`kind`, if it is one."""
    for known in KINDS:
        if kind == known:
            return known
    raise InvalidInputError(f"kind is {kind!r}: give 'hf' or 'dcp'")


def check_step(step: object) -> int:
    """`step`, if it is a whole number of at least 0."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 63:
        raise InvalidInputError(f"step is {step!r}: give a whole number of at least 0")
    return step


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[str, int, int], object] | None = None
) -> None:
    """Read every byte of a checkpoint again and compare it with what was recorded when it was saved.

    Raises `CorruptCheckpointError` that names all files which are missing, changed, cut short or too many;
    `NotFoundError` where there is no checkpoint.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise NotFoundError(2, "there is no checkpoint", os.fspath(folder))
    _native.verify_folder(folder, progress=progress)


class ReadOnlyRoot:
    """The checkpoints under a root, for watchers and evaluators. Made by `open_readonly`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.path = Path(root).absolute()
        self._root = _native.open_checkpoints_readonly(self.path)

    def list(self, kind: Kind | None = None) -> Checkpoints:
        """All published checkpoints, or those of one kind, by step."""
        return checkpoints_of(self._root, None if kind is None else check_kind(kind))

    def latest(self, kind: Kind = "hf") -> Path | None:
        """The newest published checkpoint of `kind`; None where there is none."""
        published = self.list(kind)
        return published[-1].path if published else None

    def verify(self, path: str | os.PathLike[str]) -> None:
        """As `tundish.checkpoint.verify`; a relative path is one under the root."""
        verify(self.path / path)

    @contextlib.contextmanager
    def reading(self, step: int, kind: Kind = "hf") -> Iterator[Path]:
        """Keep the checkpoint of `step` from being pruned while the block reads it; gives its path.

        Raises `NotFoundError` where it is not there (any more).
        """
        lock = self._root.read_lock(check_kind(kind), step)
        try:
            yield Path(lock.path)
        finally:
            lock.close()


def open_readonly(root: str | os.PathLike[str]) -> ReadOnlyRoot:
    """The checkpoints under `root` for somebody who does not save there: no lock, no collective, no repair.

    Raises `NotFoundError` where `root` does not exist.
    """
    return ReadOnlyRoot(root)
