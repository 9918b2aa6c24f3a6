"""A rank's file that is larger than the memory there is for it, written through windows while the caller waits.

What always holds: two windows at most are in memory, one that is filled and one that is written, whatever the size
of the file, unless one tensor alone is larger; bytes are handed in by whole pages, but for the file's end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tundish._native import FileFacts, Image, ShardWriter
from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.dcp.layout import PAGE, Layout
from tundish.checkpoint.dcp.writer import open_file
from tundish.checkpoint.saves import WriteOptions
from tundish.checkpoint.staging import Copies
from tundish.checkpoint.writing import finishing

__all__ = ["write_in_windows"]

_POLL_SECONDS = 0.002


def write_in_windows(
    layout: Layout,
    sources: Sequence[torch.Tensor],
    objects: Mapping[str, bytes],
    *,
    folder: Path,
    name: str,
    options: WriteOptions,
    limit_bytes: int,
) -> list[FileFacts]:
    """Write the file `name` of this layout in about `limit_bytes` of host memory; returns when it is durable.

    `sources`: the tensors of the layout, in its order. `objects`: the pickles of everything else.
    """
    if layout.size == 0:
        return []
    left = iter(sources)
    head = b""
    handed_in = 0
    writer = open_file(folder, name, layout.size, options)
    with finishing(writer, options):
        for window in layout.windows(limit_bytes // 2):
            size = window.stop - window.start
            _wait_until(writer, name, handed_in - max(0, limit_bytes - size))
            buffer = Buffer(size)
            memory = memoryview(buffer.image)
            memory[: len(head)] = head
            layout.fill(buffer, window, objects)
            copies = Copies([(view, next(left)) for view in layout.views(buffer, window)])
            copies.run()
            copies.wait(None)
            end = size if window.is_last else window.stop // PAGE * PAGE - window.start
            writer.write(name, window.start, buffer.image, 0, end)
            head = bytes(memory[end:])
            handed_in += end
            # The writer has it as long as it needs it.
            buffer.release()
            del memory
        return writer.finish()


def _wait_until(writer: ShardWriter, name: str, written: int) -> None:
    """Block until so many bytes are written; raises what the writer failed with."""
    while writer.progress()[0] < written:
        # This hands nothing in, but raises what would be waited for without end.
        writer.write(name, 0, Image(0), 0, 0)
        time.sleep(_POLL_SECONDS)
