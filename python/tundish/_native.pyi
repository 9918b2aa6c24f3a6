from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PlanReader",
    "fingerprint",
    "open_plan",
    "pack",
    "replace_file",
    "save",
    "shuffled_indices",
    "verify",
    "write",
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
def open_plan(
    path: _Path, progress: _Progress | None = None
) -> tuple[str, list[tuple[Any, int, int, int]]]: ...
def verify(
    columns: Sequence[NDArray[Any]],
    facts: str,
    lengths: Sequence[NDArray[Any]],
    threads: int | None = None,
    progress: _Progress | None = None,
) -> None: ...
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
