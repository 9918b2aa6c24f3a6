"""`StagedState`, a rank's part of a DCP save after it was staged: written in the background."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tundish._native import FileMetadata, write_small_file
from tundish.checkpoint.dcp.file_layout import METADATA, FileLayout, rank_extra_name, shard_name
from tundish.checkpoint.dcp.saving.save_planner import OwnedPart
from tundish.checkpoint.dcp.saving.torch_metadata import make_metadata
from tundish.checkpoint.publish.shard_writing import write_files
from tundish.checkpoint.stager import WriteOptions
from tundish.checkpoint.staging.buffers import Buffer
from tundish.checkpoint.staging.copies import Copies

__all__ = ["StagedState"]


@dataclass(kw_only=True, eq=False)
class StagedState:
    """A `tundish.checkpoint.stager.StagedSave`.

    Attributes:
        index: of this rank in the group.
        part: what this rank saves.
        layout: of its file.
        buffer: the file, into which `copies` copy the tensors; None if the file is empty.
        copies: running copies.
        objects: pickles of the values that are no tensors, in order.
        rank_extra: the contents of the file for it; empty if there is none.
    """

    index: int
    part: OwnedPart
    layout: FileLayout
    buffer: Buffer | None
    copies: Copies
    objects: Sequence[bytes]
    rank_extra: bytes

    @property
    def note(self) -> str:
        """The lengths of `objects`, as JSON. The first rank needs those of all ranks for `.metadata`."""
        return json.dumps(self.layout.object_lengths)

    def wait_staged(self, timeout: float | None) -> None:
        """Block until host memory holds everything that this rank saves."""
        self.copies.wait(timeout)

    def allow_changes(self) -> None:
        """Note that the caller may change its tensors from here on, because staging is over."""
        self.copies.allow_changes()

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Write this rank's files."""
        files: list[FileMetadata] = []
        if self.buffer is not None:
            self.layout.fill(self.buffer, self.objects)
            # Without a name: a later error would keep the image alive.
            files += write_files(
                folder, [(shard_name(self.index), self.layout.size, self.buffer.image)], options
            )
        if self.rank_extra:
            files.append(write_small_file(folder, rank_extra_name(self.index), self.rank_extra))
        self.copies.confirm()
        return files

    def write_other_files(self, folder: Path, notes: Sequence[str]) -> list[FileMetadata]:
        """On the first rank: write `.metadata`."""
        part = self.part
        if part.files is None:
            raise RuntimeError("only the first rank knows what all ranks save")
        if part.metadata is None or part.metadata[0] != notes:
            part.metadata = notes, make_metadata(part.files, [json.loads(note) for note in notes])
        return [write_small_file(folder, METADATA, part.metadata[1])]

    def abort(self) -> None:
        """Do nothing: no rank waits for another one while it writes."""

    def release(self) -> None:
        """Release the memory after all copies into it have ended."""
        self.copies.release()
        if self.buffer is not None:
            self.buffer.release()
            self.buffer = None
