"""A Hugging Face export in host memory, and its way to the disk.

Invariants:
    - Memory is given back once, by `release`.
    - A lazy save gathers before it opens a file, so that a rank that writes never holds up one that gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tundish._native import FileMetadata
from tundish.checkpoint.hf.gather.gather import Gather
from tundish.checkpoint.hf.shards import ShardBuffer
from tundish.checkpoint.hf.sidecars import Sidecars
from tundish.checkpoint.publish.shard_writing import write_files
from tundish.checkpoint.stager import WriteOptions
from tundish.checkpoint.staging.buffers import Buffer
from tundish.checkpoint.staging.copies import Copies

__all__ = ["StagedExport"]


class StagedExport:
    """A `tundish.checkpoint.stager.StagedSave` of an export.

    Args:
        files: the buffers of this rank's files.
        snapshots: other buffers, kept until everything is written.
        copies: running copies into these buffers.
        gather: fills the rest of `files` in the background, from snapshots; None if nothing is missing.
        sidecars: the files beside the weights, on the rank that writes them.
    """

    # The first rank knows everything about the other files.
    note = ""

    def __init__(
        self,
        *,
        files: Sequence[ShardBuffer],
        snapshots: Sequence[Buffer],
        copies: Copies,
        gather: Gather | None,
        sidecars: Sidecars | None,
    ) -> None:
        self._files = files
        self._snapshots = snapshots
        self._copies = copies
        self._gather = gather
        self._sidecars = sidecars

    def wait_staged(self, timeout: float | None) -> None:
        """Block until host memory holds this rank's part of all tensors."""
        self._copies.wait(timeout)

    def allow_changes(self) -> None:
        """The caller may change its tensors from here on."""
        self._copies.allow_changes()

    def write_other_files(self, folder: Path, notes: Sequence[str]) -> list[FileMetadata]:  # noqa: ARG002 (only DCP saves have notes)
        """Write everything but the weights."""
        return [] if self._sidecars is None else self._sidecars.write(folder)

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Write this rank's files and block until they are durable."""
        if self._gather is not None:
            try:
                self._gather.run()
            finally:
                # A conversion may make its products on a device.
                self._gather.wait()
            self._gather = None
        # Without a name: a later error would keep the images alive.
        written = write_files(
            folder, [(buffer.file.name, buffer.file.size, buffer.image) for buffer in self._files], options
        )
        self._copies.confirm()
        return written

    def abort(self) -> None:
        """Called instead of `write`: ranks that wait for this one fail at once."""
        if self._gather is not None:
            self._gather.abort()

    def release(self) -> None:
        """Give all memory back after all copies into it have ended."""
        self._gather = None
        self._copies.release()
        for buffer in (*self._files, *self._snapshots):
            buffer.release()
        if self._sidecars is not None:
            self._sidecars.release()
