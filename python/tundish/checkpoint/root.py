"""`Root`, the seam of publication, and `DiskRoot`, which implements it on a disk with Rust's root.

A root publishes folders under names: whole and durable, or not there. A checkpoint is called `hf-<step>` or
`dcp-<step>`; any other name is that of a single folder, as frameworks bring their own.

Invariants:
    - Nothing above knows of renames, hidden names, locks or links.
    - Every rank may list, read, lock, protect and write. The owner alone changes which names are there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import reprlib
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from tundish import _native
from tundish._native import FileMetadata
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, StorageError

_logger = logging.getLogger("tundish.checkpoint")

MANIFEST = "tundish.json"
# How long opening waits for a writer that is ending.
WAIT_SECONDS = 60.0

Kind = Literal["hf", "dcp"]
KINDS: tuple[Kind, ...] = ("hf", "dcp")
_SHOWN_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A published checkpoint: whole, and durable.

    Attributes:
        kind: "hf" or "dcp".
        tag: of its save; None without.
        size: bytes of all files.
        files: the number of them.
        extra: of a DCP save (step, epoch, consumed tokens).
    """

    kind: str
    step: int
    path: Path
    tag: str | None
    size: int
    files: int
    extra: Mapping[str, Any] = field(default_factory=dict)


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


# Classes below have a method called list.
Checkpoints = list[Checkpoint]
DamagedOnes = list[Damaged]


class Room(NamedTuple):
    """Free room, or what a checkpoint takes: bytes, and files and folders."""

    bytes: int
    files: int


# Contents of a file: pairs of an offset and the memory that lies there, which is any buffer.
Contents = Sequence[tuple[int, Any]]


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How the files of one save are written.

    Attributes:
        checksum: whether checksums are computed while writing.
        set_progress: takes a function that returns how many bytes are written so far.
    """

    checksum: bool = True
    set_progress: Callable[[Callable[[], int]], None] = lambda _: None


class Draft(Protocol):
    """The files of a name that was begun, until it is published. Any rank may write to it."""

    def write(self, files: Sequence[tuple[str, int, Contents]], options: WriteOptions) -> list[FileMetadata]:
        """Write files and block until they are durable.

        Args:
            files: name, size in bytes and contents of each, which cover the whole file.
            options: of the save; progress is reported through them.
        """

    def write_small(self, name: str, contents: bytes | BinaryIO) -> FileMetadata:
        """Write a file without tensors, durably: its contents, or an open file that is copied."""


# Name, size in bytes and checksum of a file, as it was recorded.
RecordedFile = tuple[str, int, str | None]
# The name of a file, its problem, and whether its bytes were read and differ.
FileDamage = tuple[str, str, bool]


class Published(Protocol):
    """A published folder, while it is locked.

    Attributes:
        path: for messages.
    """

    @property
    def path(self) -> Path: ...

    def open(self, file: str) -> BinaryIO:
        """Open a file for reading and seeking. Raises `NotFoundError` or another `OSError`."""

    def describe(self) -> tuple[Mapping[str, Any], Sequence[RecordedFile], str]:
        """The checkpoint (kind, step, `world_size`, `extra`), its files, and the checksum of its manifest.

        Raises `CorruptCheckpointError`.
        """

    def verify_files(self, names: set[str], *, every_byte: bool) -> Sequence[FileDamage]:
        """Compare the sizes of files and, with `every_byte`, their checksums; returns the damage."""

    def foreign_files(self) -> Sequence[str]:
        """The files that the manifest does not list."""

    def read_file(self, name: str, size: int, checksum: str | None) -> bytes:
        """The bytes of a small file. Raises `CorruptCheckpointError` where its size or checksum differs."""

    def copy_id(self) -> str:
        """A text that differs between copies on several nodes, and is the same on all ranks that see one copy."""

    def is_of_another_user(self, file: str) -> bool:
        """Whether another user wrote a file."""


@runtime_checkable
class Root(Protocol):
    """Where folders are published under names.

    Attributes:
        path: of the root, for messages and as the parent of published paths.
    """

    @property
    def path(self) -> Path: ...

    # ---- Every rank ----

    def identity(self) -> str:
        """A text that is the same on all ranks exactly if they see the same root, which this rank may write to.

        Raises `StorageError` where it may not.
        """

    def path_of(self, name: str) -> Path:
        """The path of what is published under a name."""

    def survey(self) -> tuple[Checkpoints, DamagedOnes]:
        """The whole checkpoints, and folders that are named like one and are none; each as `list` sorts."""

    def latest(self, kind: Kind) -> Path | None:
        """The newest whole checkpoint of a kind that a reader finds."""

    def list(self) -> Checkpoints:
        """The published checkpoints, by kind and step; to an owner, those that it counts."""

    def lock(self, name: str) -> contextlib.AbstractContextManager[Published]:
        """Keep what is published under `name` from being removed or replaced during a block, which reads it.

        Raises `NotFoundError` if there is nothing.
        """

    def protect(self, step: int) -> None:
        """Keep the checkpoints of `step` from being removed as long as the root is open. Returns at once."""

    @property
    def protected(self) -> Collection[int]:
        """The steps that were protected here."""

    def verify(self, name: str) -> Sequence[str]:
        """Compare every byte of a checkpoint with its manifest; returns the files without a checksum.

        Raises `CorruptCheckpointError`.
        """

    def draft(self, name: str, place: str | None = None) -> Draft:
        """The unpublished folder of `name`. A name that is no checkpoint's needs the place that `begin` returned."""

    def share(self) -> Root:
        """The same root for another object of this process; each of them closes it."""

    # ---- The owner ----

    def reserve(self, name: str, room: Room, *, overwrite: bool = False) -> Room:
        """Check that a checkpoint may be saved, and return the free room beside what other saves will take.

        Raises `StepExistsError` and `StepOrderError`.
        """

    def begin(self, name: str, *, overwrite: bool = False) -> str:
        """Begin to write under a name; returns the place for other ranks' `draft`. `publish` or `abort` ends it."""

    def publish(self, name: str, manifest: str, *, overwrite: bool = False) -> Path:
        """Give what was written its name, durably; returns its path.

        Raises `CheckpointInUseError`, and changes nothing, while a checkpoint that it replaces is read.
        """

    def abort(self, name: str) -> None:
        """Remove what was written under a name that is not published. Does nothing for one that was not begun."""

    def remove(self, name: str) -> None:
        """Remove a published checkpoint.

        Raises `CheckpointInUseError` for the newest of its kind, one that is read, and one that is protected.
        """

    def set_aside(self, step: int) -> Sequence[Path]:
        """Rename all checkpoints above `step`, so that they no longer count; returns their new paths."""

    def close(self) -> None:
        """Release the root."""


class DiskRoot:
    """A `Root` in a folder of a file system.

    Args:
        path: the folder. An owner creates it if its parent exists.
        owns: whether this process is to own it. Without, checkpoints can be read and written to, and single folders of
            other names can be published.
        wait_seconds: how long to wait for an owner that is ending. An owner on another node is looked for in any case,
            for up to 20 s.

    Raises:
        RootInUseError: another process owns it, or another `DiskRoot` of this process; `share` that one.
    """

    def __init__(self, path: Path, *, owns: bool = False, wait_seconds: float = WAIT_SECONDS) -> None:
        check_root(path)
        self.path = path
        self._owned = _native.CheckpointRoot(path, wait_seconds=wait_seconds) if owns else None
        self.protected: set[int] = set()
        self._single: dict[str, _native.AtomicFolder] = {}
        # The objects of this process that have it open.
        self._holders = 1

    @property
    def recovered(self) -> dict[str, Any]:
        """The results of opening: `removed`, `live`, `set_aside`, `repaired`, `ignored`, `failed`."""
        return dict(self._owner().recovered)

    def was_owned(self) -> bool:
        """Whether a process owns this root, or ever did."""
        return self._readonly.owner() is not None

    def share(self) -> DiskRoot:
        """The same root for another object of this process; each of them closes it."""
        self._holders += 1
        return self

    def identity(self) -> str:
        """Look up the random text that the owner wrote."""
        if self._owned is not None:
            return self._owned.owner
        number = errno.EACCES
        try:
            owner = self._readonly.owner()
            # A file to try it with would need room on the disk.
            if owner is not None and os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
                return owner
        except OSError as caught:
            number = caught.errno or number
        raise StorageError(
            number,
            "is not the same writable folder on this rank as on the first: give a root that all ranks share",
            str(self.path),
        )

    def path_of(self, name: str) -> Path:
        """The path of the folder."""
        return self.path / name

    def survey(self) -> tuple[Checkpoints, DamagedOnes]:
        """Look at all folders that are named like checkpoints."""
        whole, damaged = self._readonly.survey()
        return _checkpoints_of(whole), [Damaged(**entry) for entry in damaged]

    def latest(self, kind: Kind) -> Path | None:
        """Look for the newest whole folder."""
        return self._readonly.latest(kind)

    def list(self) -> Checkpoints:
        """List the folders that are whole checkpoints."""
        return _checkpoints_of((self._owned or self._readonly).list())

    def lock(self, name: str) -> DiskFolder:
        """Hold a read lock."""
        key = key_of(name)
        lock = self._readonly.read_lock(*key) if key else _native.CheckpointReadLock(self.path / name)
        return DiskFolder(lock)

    def protect(self, step: int) -> None:
        """Protect a step in the owner's root; other ranks send their steps to it."""
        self.protected.add(step)
        if self._owned is not None:
            self._owned.protect(step)

    def verify(self, name: str) -> Sequence[str]:
        """Read every byte."""
        return _native.verify_checkpoint(self.path / name)

    def draft(self, name: str, place: str | None = None) -> DiskDraft:
        """The hidden folder."""
        key = key_of(name)
        if place is None and key is not None:
            place = _native.unfinished_name(*key)
        if place is None:
            raise InvalidInputError(f"{name!r} is no checkpoint's name: give the place that begin returned")
        return DiskDraft(self.path / place)

    def reserve(self, name: str, room: Room, *, overwrite: bool = False) -> Room:
        """Reserve the step of a checkpoint."""
        kind, step = _checkpoint(name)
        return Room(
            *self._owner().reserve(kind, step, overwrite=overwrite, size=room.bytes, files=room.files)
        )

    def begin(self, name: str, *, overwrite: bool = False) -> str:
        """Make the hidden folder."""
        key = key_of(name)
        if key is None or self._owned is None:
            self._single[name] = folder = _native.AtomicFolder(self.path / name)
            return folder.path.name
        return self._owned.begin(*key, overwrite=overwrite).name

    def publish(self, name: str, manifest: str, *, overwrite: bool = False) -> Path:
        """Rename the hidden folder, with its manifest."""
        folder = self._single.pop(name, None)
        if folder is None:
            return self._owner().publish(*_checkpoint(name), manifest, overwrite=overwrite)
        folder.append(MANIFEST, manifest.encode())
        folder.publish()
        return self.path / name

    def abort(self, name: str) -> None:
        """Remove the hidden folder."""
        folder = self._single.pop(name, None)
        if folder is not None:
            folder.abandon()
        elif self._owned is not None and (key := key_of(name)) is not None:
            self._owned.abandon(*key)

    def remove(self, name: str) -> None:
        """Remove the folder of a checkpoint."""
        self._owner().remove(*_checkpoint(name))

    def set_aside(self, step: int) -> Sequence[Path]:
        """Rename folders to `discarded-<name>`."""
        return self._owner().discard_after(step)

    def close(self) -> None:
        """Release the writer lock, once each object that shares the root has closed it."""
        self._holders -= 1
        if self._holders == 0 and self._owned is not None:
            self._owned.close()

    @functools.cached_property
    def _readonly(self) -> _native.ReadonlyCheckpointRoot:
        return _native.open_checkpoints_readonly(self.path)

    def _owner(self) -> _native.CheckpointRoot:
        if self._owned is None:
            raise InvalidInputError(
                f"{self.path} is open for reading and writing files: open it with owns=True"
            )
        return self._owned


class DiskFolder:
    """A `Published` folder. A context manager that releases its `lock`; it warns where the file system has none."""

    def __init__(self, lock: _native.CheckpointReadLock) -> None:
        self._lock = lock
        self.path = lock.path

    def open(self, file: str) -> BinaryIO:
        """Open the file at its path."""
        try:
            return (self.path / file).open("rb")
        except FileNotFoundError as error:
            raise NotFoundError(error.errno, error.strerror, str(self.path / file)) from None

    def describe(self) -> tuple[Mapping[str, Any], Sequence[RecordedFile], str]:
        """Read the manifest."""
        return self._lock.describe()

    def verify_files(self, names: set[str], *, every_byte: bool) -> Sequence[FileDamage]:
        """Read files on all cores."""
        return self._lock.verify_files(names, every_byte=every_byte)

    def foreign_files(self) -> Sequence[str]:
        """List the folder."""
        return self._lock.foreign_files()

    def read_file(self, name: str, size: int, checksum: str | None) -> bytes:
        """Read a file whole."""
        return self._lock.read_file(name, size, checksum)

    def copy_id(self) -> str:
        """The change times of two files.

        A copy may preserve all other times, and some network file systems number a file differently on each node.
        Copies that are made at once may share one change time, but seldom two.
        """
        _, files, _ = self.describe()
        times = []
        for name in (MANIFEST, *(name for name, _, _ in files[:1])):
            # Files that are missing are found by a verification.
            with contextlib.suppress(OSError):
                times.append(f"{name} {(self.path / name).stat().st_ctime_ns}")
        return ", ".join(times)

    def is_of_another_user(self, file: str) -> bool:
        """Compare the owner of the file with this user."""
        return (self.path / file).stat().st_uid != os.geteuid()

    def __enter__(self) -> Self:
        if not self._lock.is_locked:
            _warn_without_locks(self.path.parent)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()


@dataclass(frozen=True)
class DiskDraft:
    """A `Draft` in a hidden folder."""

    folder: Path

    def write(self, files: Sequence[tuple[str, int, Contents]], options: WriteOptions) -> list[FileMetadata]:
        """Write files with Rust's shard writer."""
        if not files:
            return []
        writer = _native.ShardWriter(
            self.folder,
            [(name, size) for name, size, _ in files],
            checksum=options.checksum,
        )
        options.set_progress(lambda: writer.progress()[0])
        try:
            for name, _, contents in files:
                for offset, memory in contents:
                    writer.write(name, offset, memory)
            return writer.finish()
        except BaseException:
            # A writer that is not stopped would go on writing into a folder that its save has given up.
            writer.abort()
            raise
        finally:
            written = writer.progress()[0]
            # The save outlives the writer.
            options.set_progress(lambda: written)

    def write_small(self, name: str, contents: bytes | BinaryIO) -> FileMetadata:
        """Write or copy a file, and make it durable."""
        if isinstance(contents, bytes):
            return _native.write_small_file(self.folder, name, contents)
        target = self.folder / name
        try:
            if target.parent != self.folder:
                # Never the folder itself: if somebody removed it, the save fails.
                target.parent.mkdir(parents=True, exist_ok=True)
            # The contents alone: the file modes of a download cache do not fit a checkpoint.
            with target.open("wb") as copied:
                shutil.copyfileobj(contents, copied)
        except OSError as error:
            raise StorageError(
                error.errno or errno.EIO,
                f"cannot write the files beside the weights ({error.strerror or error})",
                error.filename or str(self.folder),
            ) from error
        known = _native.checksum_file(target)
        return FileMetadata(name, known.size, known.checksum)


# ---- Names, kinds and steps ----


def name_of(kind: str, step: int) -> str:
    """The name of a checkpoint."""
    return f"{kind}-{step}"


def key_of(name: str) -> tuple[Kind, int] | None:
    """The kind and step in the name of a checkpoint; None for any other name."""
    kind, _, step = name.partition("-")
    if kind not in KINDS or not (step.isascii() and step.isdecimal() and str(int(step)) == step):
        return None
    return check_kind(kind), int(step)


def _checkpoint(name: str) -> tuple[Kind, int]:
    key = key_of(name)
    if key is None:
        raise InvalidInputError(f"{name!r} is no checkpoint's name: it is hf-<step> or dcp-<step>")
    return key


def check_kind(kind: object) -> Kind:
    """Check that `kind` is "hf" or "dcp"."""
    for known in KINDS:
        if kind == known:
            return known
    raise InvalidInputError(f"kind is {kind!r}: give 'hf' or 'dcp'")


def plain_step(step: Any) -> Any:
    """Turn an integer of numpy into one of Python; return anything else as it is."""
    return int(step) if isinstance(step, np.integer) else step


def check_step(step: object) -> int:
    """Check that `step` is a whole number from 0 to 2**63 - 1."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 63:
        # Shortened: a state dict that was given in its place would take megabytes.
        raise InvalidInputError(f"step is {reprlib.repr(step)}: give a whole number from 0 to 2**63 - 1")
    return step


def format_steps(steps: Sequence[int]) -> str:
    """Ascending steps for a message, the newest ones if they are many."""
    shown = ", ".join(map(str, steps[-_SHOWN_STEPS:])) or "none"
    return f"steps there: {'…, ' if len(steps) > _SHOWN_STEPS else ''}{shown}"


def _checkpoints_of(entries: _native._Checkpoints) -> Checkpoints:
    """The checkpoints that Rust lists."""
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
    ]


# ---- Paths and locks on a disk ----


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
    try:
        encoded = os.fsencode(text)
        is_name = bool(encoded) and b"\0" not in encoded
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
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
