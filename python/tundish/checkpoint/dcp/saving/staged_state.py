"""`StagedState`, a rank's part of a DCP save after it was staged: written in the background."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tundish._native import FileMetadata, write_small_file
from tundish.checkpoint.dcp.file_layout import METADATA, FileLayout, rank_extra_name, shard_name
from tundish.checkpoint.dcp.saving.save_planner import RankShare
from tundish.checkpoint.dcp.saving.torch_metadata import make_metadata
from tundish.checkpoint.publish.shard_writing import write_files
from tundish.checkpoint.stager import StagedSave, WriteOptions

__all__ = ["StagedState"]


@dataclass(kw_only=True, eq=False)
class StagedState(StagedSave):
    """A rank's part of a DCP save. Its note: the lengths of `objects` as JSON, for `.metadata`.

    Attributes:
        index: of this rank in the group.
        part: what this rank saves.
        layout: of its file, which is the only buffer; there is none if the file is empty.
        objects: pickles of the values that are no tensors, in order.
        rank_extra: the contents of the file for it; empty if there is none.
    """

    index: int
    part: RankShare
    layout: FileLayout
    objects: Sequence[bytes]
    rank_extra: bytes

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Write this rank's files."""
        for buffer in self.buffers:
            self.layout.fill(buffer, self.objects)
        name, size = shard_name(self.index), self.layout.size
        # Without a name: a later error would keep the image alive.
        files = write_files(folder, [(name, size, buffer.image) for buffer in self.buffers], options)
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
