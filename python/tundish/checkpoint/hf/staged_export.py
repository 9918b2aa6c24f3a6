"""A Hugging Face export in host memory, and its way to the disk.

Invariants:
    - Memory is given back once, by `release`.
    - A lazy save gathers before it opens a file, so that a rank that writes never holds up one that gathers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tundish._native import FileMetadata
from tundish.checkpoint.hf.gather.exchange import Gather
from tundish.checkpoint.hf.gather.file_sink import FileSink
from tundish.checkpoint.hf.gather.schedule import Batch
from tundish.checkpoint.hf.shards import ShardBuffer
from tundish.checkpoint.hf.sidecars import Sidecars
from tundish.checkpoint.publish.shard_writing import write_files
from tundish.checkpoint.stager import WriteOptions
from tundish.checkpoint.staging.buffers import Buffer
from tundish.checkpoint.staging.copies import EagerCopy, LazyCopy

__all__ = ["LazyGather", "StagedExport"]


@dataclass(frozen=True, kw_only=True)
class LazyGather:
    """A gather that runs in the background, of snapshots."""

    gather: Gather
    rounds: Sequence[Sequence[Batch]]
    sink: FileSink

    def run(self) -> None:
        """Collective: gather everything."""
        try:
            self.gather.run(self.rounds, self.sink)
        finally:
            # A conversion may make its products on a device.
            self.sink.wait()


class StagedExport:
    """A `tundish.checkpoint.stager.StagedSave` of an export.

    Args:
        files: the buffers of this rank's files.
        snapshots: other buffers, held until everything is written.
        copies: under way into these buffers.
        lazy_gather: fills what is missing in `files`; None where nothing is.
        sidecars: the files beside the weights, on the rank that writes them.
        weight_names: names of all files with weights, of all ranks.
    """

    # The first rank knows everything about the other files.
    note = ""

    def __init__(
        self,
        *,
        files: Sequence[ShardBuffer],
        snapshots: Sequence[Buffer],
        copies: Sequence[EagerCopy | LazyCopy],
        lazy_gather: LazyGather | None,
        sidecars: Sidecars | None,
        weight_names: Sequence[str],
    ) -> None:
        self._files = files
        self._snapshots = snapshots
        self._copies = copies
        self._lazy_gather = lazy_gather
        self._sidecars = sidecars
        self._weight_names = frozenset(weight_names)

    def wait_staged(self, timeout: float | None) -> None:
        """Block until host memory holds everything that this rank has to give."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for copy in self._copies:
            copy.wait(deadline)

    def allow_changes(self) -> None:
        """The caller may change its tensors from here on."""
        for copy in self._copies:
            copy.allow_changes()

    def write_other_files(self, folder: Path, notes: Sequence[str] = ()) -> list[FileMetadata]:  # noqa: ARG002
        """Write everything but the weights."""
        return [] if self._sidecars is None else self._sidecars.write(folder, self._weight_names)

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Write this rank's files and block until they are durable."""
        if self._lazy_gather is not None:
            self._lazy_gather.run()
            self._lazy_gather = None
        # Without a name: a later error would keep the images alive.
        written = write_files(
            folder, [(buffer.file.name, buffer.file.size, buffer.image) for buffer in self._files], options
        )
        for copy in self._copies:
            copy.confirm()
        return written

    def abort(self) -> None:
        """Called instead of `write`: ranks that wait for this one fail at once."""
        if self._lazy_gather is not None:
            self._lazy_gather.gather.abort()

    def release(self) -> None:
        """Give all memory back, once nothing is copied into it any more."""
        self._lazy_gather = None
        for copy in self._copies:
            # What went wrong with it was raised by `wait`.
            with contextlib.suppress(Exception):
                copy.release()
        for buffer in (*self._files, *self._snapshots):
            buffer.release()
        if self._sidecars is not None:
            self._sidecars.release()
