"""What a kind of checkpoint gives to the checkpointer, and the handle of a save that callers hold.

A save goes through three hands. Its `Plan` is made on the caller's thread of every rank and refuses what can be
refused early; `stage` takes the tensors into host memory; `Staged` is what the kind's finalize thread works
on. What always holds: nothing of a plan changes the disk before every rank has one and all are equal; a plan that is
not staged, and what was staged, is released, whatever happens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tundish import _native
from tundish.distributed import VoteId
from tundish.errors import InvalidInputError, TimedOutError
from tundish.waiting import SteadyFuture

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "News",
    "Plan",
    "PlannedFile",
    "Save",
    "Staged",
    "Staging",
    "WriteOptions",
]

Staging = Literal["eager", "lazy"]

# As huggingface_hub takes by default. One rank writes a file, so files are small enough for many ranks to share in.
DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file of a checkpoint that is yet to be written: `rank` is the rank within the group that writes it."""

    name: str
    size: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How the files of one save are written.

    `checksum`: whether checksums are computed on the way. `writers_per_node`: processes of this node that may
    write at once. `progress`: is given a function that says how many bytes are written so far.
    """

    checksum: bool
    writers_per_node: int
    progress: Callable[[Callable[[], int]], None]


class News(enum.IntEnum):
    """What is not as it was at the save before: nothing; the state dict's form; a group, which is not there.

    It was broken off, or this is the first save that needs it.
    """

    NONE = 0
    OTHER_FORM = 1
    NO_GROUP = 2


class Staged(Protocol):
    """A save whose tensors are in host memory, or on their way there."""

    def wait_staged(self, timeout: float | None) -> None:
        """Block until host memory holds everything; raises what went wrong on the way, `TimedOutError`."""

    def settle(self) -> None:
        """After `wait_staged`, on a thread that is told of it: from here on it may change what was staged."""

    def prewrite(self, folder: Path) -> list[_native.FileMetadata]:
        """Write all files but the weights, durably. On the group's first rank, on a background thread."""

    def write(self, folder: Path, options: WriteOptions) -> list[_native.FileMetadata]:
        """Write this rank's files and block until they are durable. On a background thread of every rank."""

    def break_off(self) -> None:
        """Where `write` is not called, though other ranks may call theirs: let those fail that wait for this one."""

    def release(self) -> None:
        """Give the host memory back, whatever came before. Never raises."""


class Plan(Protocol):
    """What one save will write, known from names, shapes and dtypes alone.

    `files`: all files with weights, equal on all ranks; empty where the kind learns them only while staging.
    `staged_bytes`: host memory that this rank's staging takes. `most_staged_bytes`: where ranks stage together, of the
    one that takes most, the same on all; else of this one. `written_bytes`: what the whole checkpoint will take on the
    disk, of all ranks. `fingerprint`: equal on all ranks exactly where their plans agree. `news`: what the other ranks
    have to hear of this one; then more than a vote may be needed before staging.
    """

    @property
    def files(self) -> tuple[PlannedFile, ...]: ...
    @property
    def staged_bytes(self) -> int: ...
    @property
    def most_staged_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def news(self) -> News: ...

    def reserve(self) -> None:
        """Take the host memory, local to this rank, and begin to copy if that is of use; raises `MemoryError` kinds.

        Before the vote, so that no rank waits in a collective for one that has no memory. What is begun for a save that
        is refused, `release` ends.
        """

    def react_to(self, news: News, meeting: VoteId) -> None:
        """After the vote, on all ranks alike: the greatest news of any. `compare` or `release` follows, on each.

        `meeting`: of the vote that it was told in.
        """

    def compare(self) -> bool:
        """Collective where some rank has news: whether this rank stages something else than it expected to.

        Then its memory is to be reserved again. `stage`, `write_through` or `release` follows.
        """

    def stage(self) -> Staged:
        """Take the tensors. On the caller's thread, collective where they are sharded.

        When it returns from an eager staging, nothing that the caller does to the model changes what is saved.
        """

    def through_bytes(self, limit_bytes: int) -> int:
        """Host memory that `write_through` takes where it is to take `limit_bytes`: more if one tensor needs more."""

    def write_through(self, folder: Path, options: WriteOptions, limit_bytes: int) -> Staged:
        """In place of `reserve` and `stage`: write while the tensors are taken, in up to `limit_bytes` of host memory.

        As `stage` otherwise.
        """

    def release(self) -> None:
        """Give back what was opened and reserved, where `stage` does not succeed. Never raises.

        May be called again, on another thread, where Ctrl-C interrupted it.
        """


class Save(SteadyFuture[Path]):
    """A save under way: a future of the path it is published under.

    `result()` raises what the save failed with, the same on every rank; it cannot be cancelled. In a function that a
    save of its kind calls, before that is over, `result` and `exception` would wait for themselves: they raise
    `InvalidInputError`.
    """

    def __init__(self, kind: str, step: int, total_bytes: int, *, is_own_thread: Callable[[], bool]) -> None:
        super().__init__()
        self.kind = kind
        self.step = step
        self._is_own_thread = is_own_thread
        self._total = total_bytes
        self._written: Callable[[], int] = lambda: 0
        # Until the save is over.
        self._staging: Staged | None = None
        self._was_staged = False

    def result(self, timeout: float | None = None) -> Path:
        """As that of a `concurrent.futures.Future`."""
        self._refuse_own_wait("result", self.done)
        try:
            return super().result(timeout)
        finally:
            # Else the error holds on to what it is raised from.
            del self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As that of a `concurrent.futures.Future`."""
        self._refuse_own_wait("exception", self.done)
        return super().exception(timeout)

    def staged(self, timeout: float | None = None) -> None:
        """Block until host memory holds everything that this rank saves, whether or not an earlier save is over.

        Raises `TimedOutError`; where staging failed, what it failed with.
        """
        staging = self._staging
        if staging is None:
            if not self._was_staged:
                self.result()
            return
        try:
            staging.wait_staged(timeout)
        except TimedOutError as error:
            raise TimedOutError(
                f"step {self.step} ({self.kind}) was not staged within {timeout} s"
            ) from error
        staging.settle()

    def progress(self) -> tuple[int, int]:
        """Bytes that this rank has written so far, and all that it will write."""
        return (self._total if self.done() and self.exception() is None else self._written()), self._total

    def _refuse_own_wait(self, call: str, has_come: Callable[[], bool]) -> None:
        """Refuse to wait for what is yet to come on the thread that works on the saves of this kind."""
        if self._is_own_thread() and not has_come():
            raise InvalidInputError(
                f"{call}() in a callback of a save would wait for that save itself: call it on the thread that trains"
            )

    # For the checkpointer alone.

    def note_total(self, total_bytes: int) -> None:
        """What this rank will write is something else than it expected to."""
        self._total = total_bytes

    def note_staging(self, staging: Staged) -> None:
        """What there is to wait for, and whom to tell that somebody was told."""
        self._staging = staging

    def note_staged(self) -> None:
        """Everything is in host memory."""
        self._was_staged = True

    def note_written(self, written: Callable[[], int]) -> None:
        """How many bytes are written is asked of `written`."""
        self._written = written

    def finish(self, path: Path) -> None:
        """The checkpoint is published and recorded."""
        self._staging = None
        self.set_result(path)

    def fail(self, error: BaseException) -> None:
        """The save came to nothing, or what follows publication failed."""
        self._staging = None
        self.set_exception(error)
