"""The interface between `Checkpointer` and the kinds of checkpoints: `Stager` copies, `StagedSave` writes.

The caller's thread of every rank makes a `Stager`, which refuses bad arguments early. `Stager.stage` copies the
tensors into host memory. The save queue's thread then works on the `StagedSave`.

Invariants:
    - A stager changes nothing on the disk.
    - A stager that is not staged, and a staged save, is released whatever happens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tundish import _native
from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.copies import Copies
from tundish.distributed import VoteId

__all__ = ["DEFAULT_SHARD_BYTES", "StagedSave", "Stager", "Staging", "WriteOptions"]

Staging = Literal["eager", "lazy"]

# As huggingface_hub takes by default. One rank writes a file, so files are small enough for many ranks to share in.
DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How the files of one save are written.

    Attributes:
        checksum: whether checksums are computed while writing.
        writers_per_node: how many processes of this node may write at once.
        set_progress: takes a function that returns how many bytes are written so far.
    """

    checksum: bool
    writers_per_node: int
    set_progress: Callable[[Callable[[], int]], None]


@dataclass(kw_only=True, eq=False)
class StagedSave(ABC):
    """A save whose tensors are in host memory, or on their way there.

    Attributes:
        copies: the running copies.
        buffers: host memory into which they copy.
        note: a text that the first rank needs from every rank in `write_other_files`.
    """

    copies: Copies
    buffers: Sequence[Buffer]
    note: str = ""

    def wait_staged(self, timeout: float | None) -> None:
        """Block until host memory holds everything. Raises the error of a copy, or `TimedOutError`."""
        self.copies.wait(timeout)

    def allow_changes(self) -> None:
        """After `wait_staged`, on the caller's thread: the caller may change the tensors from here on."""
        self.copies.allow_changes()

    @abstractmethod
    def write(self, folder: Path, options: WriteOptions) -> list[_native.FileMetadata]:
        """Write this rank's files and block until they are durable. On a background thread of every rank."""

    @abstractmethod
    def write_other_files(self, folder: Path, notes: Sequence[str]) -> list[_native.FileMetadata]:
        """Write all other files, durably. On the group's first rank, after every rank's `write`, with their notes."""

    def abort(self) -> None:  # noqa: B027 (only some saves have ranks that wait)
        """Called instead of `write` while other ranks may call theirs: ranks that wait for this one fail at once."""

    def release(self) -> None:
        """Stop the copies and give the host memory back. Never raises."""
        self.copies.release()
        for buffer in self.buffers:
            buffer.release()


class Stager(Protocol):
    """One save before it is staged, known from names, shapes and dtypes alone.

    `start_save` calls `reserve`, `prepare` and `stage` in this order. A rank that needs preparation reserves after
    `prepare`; one whose `prepare` returns True reserves again. If `stage` does not succeed, `release` is called.

    Attributes:
        file_bytes: bytes of the files that this rank writes; after `prepare`.
        staged_bytes: host memory that staging takes on this rank; after `prepare`.
        checkpoint_bytes: on the first rank, bytes of the whole checkpoint on the disk; after `prepare`.
        fingerprint: equal on all ranks exactly if their saves fit together.
        needs_preparation: whether `prepare` has to talk to other ranks, as far as this rank knows.
        replicas: hashes of what several ranks hold, by a name for these ranks; equal under one name, unless a value
            differs between ranks.
    """

    @property
    def file_bytes(self) -> int: ...
    @property
    def staged_bytes(self) -> int: ...
    @property
    def checkpoint_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def needs_preparation(self) -> bool: ...
    @property
    def replicas(self) -> Mapping[str, str]: ...

    def prepare(self, vote: VoteId, *, any_needs: bool, do_replicas_differ: bool) -> bool:
        """Collective if any rank needs it: prepare staging with the other ranks. Fails on all ranks or on none.

        Values that differ between ranks by mistake are refused here, with their names.

        Args:
            vote: the vote in which all ranks had a stager.
            any_needs: whether `needs_preparation` holds on any rank; the same on all.
            do_replicas_differ: whether `replicas` differ between ranks; the same on all.

        Returns:
            Whether `staged_bytes` changed and the reserved memory was released.
        """

    def reserve(self) -> None:
        """Take the host memory, local to this rank. Raises `MemoryError` kinds."""

    def stage(self) -> StagedSave:
        """Copy the tensors. On the caller's thread, collective if they are sharded.

        When it returns from an eager staging, later changes of the model do not change the save.
        """

    def release(self) -> None:
        """Close files and give back memory, if `stage` does not succeed. Never raises."""
