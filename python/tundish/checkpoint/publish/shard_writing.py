"""Writes the files of one rank with the Rust shard writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tundish._native import FileImage, FileMetadata, ShardWriter
from tundish.checkpoint.stager import WriteOptions

__all__ = ["write_files"]


def write_files(
    folder: Path, files: Sequence[tuple[str, int, FileImage]], options: WriteOptions
) -> list[FileMetadata]:
    """Write files and block until they are durable.

    Args:
        folder: in which they are made.
        files: name, size in bytes and image of each.
        options: of the save; progress is reported through them.
    """
    if not files:
        return []
    writer = ShardWriter(
        folder,
        [(name, size) for name, size, _ in files],
        checksum=options.checksum,
        writers_per_node=options.writers_per_node,
    )
    options.set_progress(lambda: writer.progress()[0])
    try:
        for name, size, image in files:
            writer.write(name, 0, image, 0, size)
        return writer.finish()
    except BaseException:
        # A writer that is not stopped would go on writing into a folder that its save has given up.
        writer.abort()
        raise
    finally:
        written = writer.progress()[0]
        # The save outlives the writer.
        options.set_progress(lambda: written)
