from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CheckpointReadLock",
    "CheckpointRoot",
    "FileFacts",
    "Image",
    "PlanReader",
    "ReadonlyCheckpoints",
    "ShardWriter",
    "checksum_file",
    "fingerprint",
    "open_checkpoints_readonly",
    "open_plan",
    "pack",
    "replace_file",
    "sample_index",
    "save",
    "seal_manifest",
    "shuffled_indices",
    "staging_stats",
    "trim_staging",
    "verify",
    "verify_folder",
    "write",
    "write_sidecar",
]

@type_check_only
class Job(TypedDict):
    lengths: Sequence[NDArray[Any]]
    order: NDArray[Any] | None
    seed: int | None
    max_length: int
    drop_last: bool
    global_pack: bool
    threads: int | None

_Progress = Callable[[str, int, int], object]
_Path = str | PathLike[str]

def pack(job: Job, progress: _Progress | None = None) -> tuple[str, tuple[NDArray[Any], ...]]: ...
def write(job: Job, target: _Path, progress: _Progress | None = None) -> str: ...
def fingerprint(job: Job, progress: _Progress | None = None) -> str: ...
def save(
    columns: Sequence[NDArray[Any]], facts: str, target: _Path, progress: _Progress | None = None
) -> None: ...
def open_plan(path: _Path, progress: _Progress | None = None) -> tuple[str, tuple[NDArray[Any], ...]]: ...
def verify(
    columns: Sequence[NDArray[Any]],
    facts: str,
    lengths: Sequence[NDArray[Any]],
    order: NDArray[Any] | None = None,
    threads: int | None = None,
    progress: _Progress | None = None,
) -> None: ...
def sample_index(
    columns: Sequence[NDArray[Any]],
    facts: str,
    lengths: Sequence[NDArray[Any]] | None = None,
    order: NDArray[Any] | None = None,
    progress: _Progress | None = None,
) -> NDArray[Any]: ...
def replace_file(target: _Path, contents: bytes) -> None: ...
def shuffled_indices(samples: int, seed: int, progress: _Progress | None = None) -> NDArray[Any]: ...

@final
class PlanReader:
    def __new__(
        cls, columns: Sequence[NDArray[Any]], lengths: Sequence[NDArray[Any]] | None, global_pack: bool
    ) -> PlanReader: ...
    def pack(self, number: int) -> tuple[int, list[tuple[int, int, int | None]]]: ...
    def lookup(
        self, packs: NDArray[Any]
    ) -> tuple[
        NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]
    ]: ...

@final
class Image:
    def __new__(cls, size: int) -> Image: ...
    @property
    def size(self) -> int: ...
    @property
    def address(self) -> int: ...
    def fill(
        self, places: Sequence[tuple[int, int, Any, Any]], tensors: Sequence[Any], threads: int
    ) -> list[int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@type_check_only
class StagingStats(TypedDict):
    in_use: int
    cached: int
    peak: int

def staging_stats() -> StagingStats: ...
def trim_staging() -> int: ...

@final
class FileFacts:
    def __new__(cls, name: str, size: int, checksum: str | None) -> FileFacts: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def checksum(self) -> str | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class ShardWriter:
    def __new__(
        cls,
        folder: _Path,
        files: Sequence[tuple[str, int]],
        *,
        checksum: bool,
        writers_per_node: int,
    ) -> ShardWriter: ...
    def write(self, name: str, offset: int, image: Image, start: int, length: int) -> None: ...
    def progress(self) -> tuple[int, int]: ...
    def finish(self) -> list[FileFacts]: ...
    def abort(self) -> None: ...

def write_sidecar(folder: _Path, name: str, contents: bytes) -> FileFacts: ...
def checksum_file(path: _Path) -> FileFacts: ...
def verify_folder(folder: _Path, *, progress: _Progress | None = None) -> None: ...
def seal_manifest(manifest: str) -> str: ...

@type_check_only
class Checkpoint(TypedDict):
    kind: str
    step: int
    path: Path
    tag: str | None
    bytes: int
    world_size: int | None
    extra: Any

@type_check_only
class Damaged(TypedDict):
    kind: str
    step: int
    path: Path
    reason: str

@type_check_only
class Recovery(TypedDict):
    removed: list[str]
    live: list[str]
    set_aside: list[str]
    repaired: list[str]
    ignored: dict[str, str]
    failed: list[str]

# Classes below have a method called list.
_Checkpoints = list[Checkpoint]
_Damaged = list[Damaged]
_Paths = list[Path]

@final
class CheckpointRoot:
    def __new__(cls, path: _Path, *, wait_seconds: float) -> CheckpointRoot: ...
    @property
    def path(self) -> Path: ...
    @property
    def recovered(self) -> Recovery: ...
    def begin(self, kind: str, step: int, *, overwrite: bool) -> Path: ...
    def publish(self, kind: str, step: int, manifest_json: str, *, overwrite: bool) -> Path: ...
    def abandon(self, kind: str, step: int) -> None: ...
    def list(self) -> _Checkpoints: ...
    def latest(self, kind: str) -> Path | None: ...
    def remove(self, kind: str, step: int) -> None: ...
    def discard_after(self, step: int) -> _Paths: ...
    def read_lock(self, kind: str, step: int) -> CheckpointReadLock: ...
    def close(self) -> None: ...

@final
class ReadonlyCheckpoints:
    @property
    def path(self) -> Path: ...
    def list(self) -> _Checkpoints: ...
    def survey(self) -> tuple[_Checkpoints, _Damaged]: ...
    def latest(self, kind: str) -> Path | None: ...
    def read_lock(self, kind: str, step: int) -> CheckpointReadLock: ...

@final
class CheckpointReadLock:
    def __new__(cls, folder: _Path) -> CheckpointReadLock: ...
    @property
    def path(self) -> Path: ...
    @property
    def is_locked(self) -> bool: ...
    def describe(self) -> tuple[Checkpoint, str]: ...
    def close(self) -> None: ...

def open_checkpoints_readonly(path: _Path) -> ReadonlyCheckpoints: ...
