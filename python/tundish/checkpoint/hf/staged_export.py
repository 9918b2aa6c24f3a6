"""A Hugging Face export in host memory, and its way to the disk.

Invariants:
    - Memory is given back once, by `release`.
    - A lazy save gathers before it opens a file, so that a rank that writes never holds up one that gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tundish._native import FileMetadata
from tundish.checkpoint.hf.gather.gather import Gather
from tundish.checkpoint.hf.shards import ShardBuffer
from tundish.checkpoint.hf.sidecars import Sidecars
from tundish.checkpoint.publish.shard_writing import write_files
from tundish.checkpoint.stager import StagedSave, WriteOptions

__all__ = ["StagedExport"]


@dataclass(kw_only=True, eq=False)
class StagedExport(StagedSave):
    """A Hugging Face export. The first rank knows everything about the other files, so that it has no notes.

    Attributes:
        files: the buffers of this rank's files, among all buffers.
        gather: fills the rest of `files` in the background, from snapshots; None if nothing is missing.
        sidecars: the files beside the weights, on the rank that writes them.
    """

    files: Sequence[ShardBuffer]
    gather: Gather | None
    sidecars: Sidecars | None

    def write_other_files(self, folder: Path, notes: Sequence[str]) -> list[FileMetadata]:  # noqa: ARG002 (it has none)
        """Write everything but the weights."""
        return [] if self.sidecars is None else self.sidecars.write(folder)

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Write this rank's files and block until they are durable."""
        if self.gather is not None:
            try:
                self.gather.run()
            finally:
                # A conversion may make its products on a device.
                self.gather.wait()
            self.gather = None
        # Without a name: a later error would keep the images alive.
        written = write_files(
            folder, [(buffer.file.name, buffer.file.size, buffer.image) for buffer in self.files], options
        )
        self.copies.confirm()
        return written

    def abort(self) -> None:
        """Called instead of `write`: ranks that wait for this one fail at once."""
        if self.gather is not None:
            self.gather.abort()

    def release(self) -> None:
        """Stop the copies, give the host memory back and close the files beside the weights."""
        self.gather = None
        super().release()
        if self.sidecars is not None:
            self.sidecars.release()
