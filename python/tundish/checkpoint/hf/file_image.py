"""The files of an export in memory, byte by byte as they will lie on the disk.

What always holds: an image has its header from the beginning; its places are those of its file.
"""

from __future__ import annotations

from tundish.checkpoint.hf.shards import ShardFile
from tundish.checkpoint.staging.buffers import Buffer

__all__ = ["FileImage"]


class FileImage(Buffer):
    """A whole file, with its header."""

    def __init__(self, file: ShardFile, *, is_pinned: bool = False) -> None:
        super().__init__(file.size, is_pinned=is_pinned)
        self.file = file
        memoryview(self.image)[: len(file.header)] = file.header
