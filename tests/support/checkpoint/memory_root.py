"""A `Root` in memory: the second implementation of the seam, as short as its contract allows."""

from __future__ import annotations

import contextlib
import errno
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tundish._native import FileMetadata
from tundish.checkpoint.root import (
    KINDS,
    MANIFEST,
    Checkpoint,
    Checkpoints,
    Contents,
    Damaged,
    Kind,
    Room,
    WriteOptions,
    key_of,
)
from tundish.errors import (
    CheckpointInUseError,
    CorruptCheckpointError,
    InvalidInputError,
    NotFoundError,
    StepExistsError,
    StepOrderError,
)

Files = dict[str, bytes]


class MemoryDraft:
    """Files that are being written."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(self, files: Sequence[tuple[str, int, Contents]], options: WriteOptions) -> list[FileMetadata]:
        for name, size, contents in files:
            data = bytearray(size)
            for offset, memory in contents:
                view = memoryview(memory).cast("B")
                data[offset : offset + len(view)] = view
            self._files[name] = bytes(data)
        written = sum(size for _, size, _ in files)
        options.set_progress(lambda: written)
        return [FileMetadata(name, size, None) for name, size, _ in files]

    def write_small(self, name: str, contents: bytes | BinaryIO) -> FileMetadata:
        self._files[name] = contents if isinstance(contents, bytes) else contents.read()
        return FileMetadata(name, len(self._files[name]), None)


class MemoryFolder:
    """Files that are published and locked."""

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self._files = files

    def open(self, file: str) -> BinaryIO:
        if file not in self._files:
            raise NotFoundError(errno.ENOENT, "is not there", str(self.path / file))
        return io.BytesIO(self._files[file])

    def describe(self) -> tuple[dict[str, Any], list[tuple[str, int, None]], str]:
        text = self._files[MANIFEST]
        manifest = json.loads(text)
        return manifest, [(file["name"], file["size"], None) for file in manifest["files"]], str(hash(text))

    def verify_files(self, names: set[str], *, every_byte: bool) -> list[tuple[str, str, bool]]:
        sizes = {name: size for name, size, _ in self.describe()[1]}
        return [
            (name, "has another size", False)
            for name in sorted(names)
            if len(self._files.get(name, b"")) != sizes[name]
        ]

    def foreign_files(self) -> list[str]:
        return sorted(self._files.keys() - {MANIFEST} - {name for name, _, _ in self.describe()[1]})

    def read_file(self, name: str, size: int, checksum: str | None) -> bytes:
        if len(self._files.get(name, b"")) != size:
            raise CorruptCheckpointError(f"{self.path} has a changed {name}", (name,))
        return self._files[name]

    def copy_id(self) -> str:
        return "memory"

    def is_of_another_user(self, file: str) -> bool:
        return False


class MemoryRoot:
    """Folders of files in dictionaries."""

    def __init__(self, room: Room = Room(1 << 40, 1 << 20)) -> None:  # noqa: B008 (it is immutable)
        self.path = Path("/memory")
        self.protected: set[int] = set()
        self.published: dict[str, Files] = {}
        self._begun: dict[str, Files] = {}
        self._reserved: dict[str, Room] = {}
        self._readers: dict[str, int] = {}
        self._room = room
        self._holders = 1

    def identity(self) -> str:
        return "memory"

    def path_of(self, name: str) -> Path:
        return self.path / name

    def survey(self) -> tuple[Checkpoints, list[Damaged]]:
        return self.list(), []

    def latest(self, kind: Kind) -> Path | None:
        return next((one.path for one in reversed(self.list()) if one.kind == kind), None)

    def list(self) -> Checkpoints:
        keys = [key for name in self.published if (key := key_of(name)) is not None]
        return [
            self._described(f"{kind}-{step}")
            for kind, step in sorted(keys, key=lambda key: (KINDS.index(key[0]), key[1]))
        ]

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[MemoryFolder]:
        self._of(name, MANIFEST)
        self._readers[name] = self._readers.get(name, 0) + 1
        try:
            yield MemoryFolder(self.path_of(name), self.published[name])
        finally:
            self._readers[name] -= 1

    def verify(self, name: str) -> list[str]:
        with self.lock(name) as folder:
            names = [file for file, _, _ in folder.describe()[1]]
            damaged = [file for file, _, _ in folder.verify_files(set(names), every_byte=True)]
        if damaged:
            raise CorruptCheckpointError(f"{name} has a changed {damaged[0]}", tuple(damaged))
        return names

    def protect(self, step: int) -> None:
        self.protected.add(step)

    def draft(self, name: str, place: str | None = None) -> MemoryDraft:
        return MemoryDraft(self._begun[name])

    def share(self) -> MemoryRoot:
        self._holders += 1
        return self

    def reserve(self, name: str, room: Room, *, overwrite: bool = False) -> Room:
        self._check(name, overwrite)
        self._reserved[name] = room
        others = [taken for other, taken in self._reserved.items() if other != name]
        there = [Room(sum(map(len, files.values())), len(files) + 1) for files in self.published.values()]
        return Room(*(free - sum(column) for free, *column in zip(self._room, *others, *there, strict=True)))

    def begin(self, name: str, *, overwrite: bool = False) -> str:
        self._check(name, overwrite)
        self._begun[name] = {}
        return name

    def publish(self, name: str, manifest: str, *, overwrite: bool = False) -> Path:
        if name in self.published and (not overwrite or self._readers.get(name)):
            raise CheckpointInUseError(errno.EBUSY, "it is being read", str(self.path_of(name)))
        self.published[name] = self._begun.pop(name) | {MANIFEST: manifest.encode()}
        self._reserved.pop(name, None)
        return self.path_of(name)

    def abort(self, name: str) -> None:
        self._begun.pop(name, None)
        self._reserved.pop(name, None)

    def remove(self, name: str) -> None:
        self._of(name, MANIFEST)
        key = key_of(name)
        if key is not None:
            newest = max(one.step for one in self.list() if one.kind == key[0])
            if key[1] == newest or key[1] in self.protected or self._readers.get(name):
                raise CheckpointInUseError(errno.EBUSY, "it stays", str(self.path_of(name)))
        del self.published[name]

    def set_aside(self, step: int) -> Sequence[Path]:
        newer = [f"{one.kind}-{one.step}" for one in self.list() if one.step > step]
        for name in newer:
            self.published[f"discarded-{name}"] = self.published.pop(name)
        return [self.path_of(f"discarded-{name}") for name in newer]

    def close(self) -> None:
        self._holders -= 1

    def _check(self, name: str, overwrite: bool) -> None:
        if name in self._begun or (name in self.published and not overwrite):
            raise StepExistsError(errno.EEXIST, "is there already", str(self.path_of(name)))
        key = key_of(name)
        newer = [one.step for one in self.list() if key and one.kind == key[0] and one.step > key[1]]
        if newer:
            raise StepOrderError(f"{name} is below step {newer[-1]}")

    def _of(self, name: str, file: str) -> bytes:
        if name not in self.published or file not in self.published[name]:
            raise NotFoundError(errno.ENOENT, "is not there", str(self.path_of(name) / file))
        return self.published[name][file]

    def _described(self, name: str) -> Checkpoint:
        manifest: dict[str, Any] = json.loads(self._of(name, MANIFEST))
        if (manifest["kind"], manifest["step"]) != key_of(name):
            raise InvalidInputError(f"{name} has the manifest of another")
        files = manifest["files"]
        return Checkpoint(
            kind=manifest["kind"],
            step=manifest["step"],
            path=self.path_of(name),
            tag=manifest.get("tag"),
            size=sum(file["size"] for file in files),
            files=len(files),
            extra=manifest.get("extra") or {},
        )
