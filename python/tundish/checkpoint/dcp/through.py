"""A rank's file that is larger than the memory there is for it, written while the caller waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch

from tundish._native import FileMetadata
from tundish.checkpoint.dcp.layout import Layout
from tundish.checkpoint.dcp.writer import open_file
from tundish.checkpoint.publish.shard_writing import finishing
from tundish.checkpoint.save import WriteOptions
from tundish.checkpoint.staging.copies import Copies
from tundish.checkpoint.staging.tensor_copy import Block
from tundish.checkpoint.staging.write_windows import Span, WriteWindows

__all__ = ["write_in_windows"]


def write_in_windows(
    layout: Layout,
    sources: Sequence[torch.Tensor],
    objects: Mapping[str, bytes],
    *,
    folder: Path,
    name: str,
    options: WriteOptions,
    limit_bytes: int,
) -> list[FileMetadata]:
    """Write the file `name` of this layout in about `limit_bytes` of host memory; returns when it is durable.

    `sources`: the tensors of the layout, in its order. `objects`: the pickles of everything else.
    """
    if layout.size == 0:
        return []
    left = iter(sources)
    writer = open_file(folder, name, layout.size, options)
    windows = WriteWindows(writer, limit_bytes)
    try:
        with finishing(writer, options):
            for window in layout.windows(limit_bytes // 2):
                span = Span(name=name, start=window.start, stop=window.stop, is_end=window.is_last)
                buffer = windows.turn_to(span)
                places = layout.tensor_places(window)
                block = Block(
                    buffer=buffer,
                    places=places,
                    sources=list(islice(left, len(places))),
                    names=[item.name for item in window.tensors],
                    free_from=places.stops_before,
                )
                copies = Copies([block])
                copies.run()
                copies.wait(None)
                layout.fill(buffer, window, objects)
            windows.hand_in()
            return writer.finish()
    finally:
        windows.release()
