"""Exports that are larger than the memory there is for them, written while the caller waits.

Owns which tensors share a window. What always holds: a window is filled by tensors that are wanted one after the other,
and has the header of its file where it is the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tundish._native import FileMetadata, ShardWriter
from tundish.checkpoint.hf.shards import Entry, ShardFile
from tundish.checkpoint.hf.sidecars import Sidecars
from tundish.checkpoint.hf.staged_export import open_writer
from tundish.checkpoint.publish.shard_writing import finishing
from tundish.checkpoint.save import WriteOptions
from tundish.checkpoint.staging.buffers import Buffer, Place, Places
from tundish.checkpoint.staging.copies import Copies
from tundish.checkpoint.staging.tensor_copy import Block
from tundish.checkpoint.staging.write_windows import PAGE, Span, WriteWindows
from tundish.checkpoint.tensors import Facts

__all__ = ["Window", "WindowSink", "WrittenExport", "windows_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A stretch of a file: its header where it is the first, then `entries`, up to the end where it is the last."""

    file: ShardFile
    entries: tuple[Entry, ...]

    @property
    def span(self) -> Span:
        """Its bytes in the file."""
        first, stop = self.entries[0].start, self.entries[-1].stop
        start = 0 if first == len(self.file.header) else first // PAGE * PAGE
        return Span(name=self.file.name, start=start, stop=stop, is_end=stop == self.file.size)


def windows_of(files: Sequence[ShardFile], window_bytes: int) -> list[Window]:
    """Cut files into windows of up to `window_bytes`, or of one tensor where that alone is larger."""
    windows: list[Window] = []
    for file in files:
        taken: list[Entry] = []
        for entry in file.entries:
            if taken and entry.stop - taken[0].start // PAGE * PAGE > window_bytes:
                windows.append(Window(file=file, entries=tuple(taken)))
                taken = []
            taken.append(entry)
        windows.append(Window(file=file, entries=tuple(taken)))
    return windows


class WindowSink:
    """Puts products into windows, one after the other, and writes each while the next is filled.

    Args:
        windows: of this rank, file by file.
        products: names, shapes and dtypes of all products.
        folder, options: of the writing.
        limit_bytes: how much host memory windows may take, unless one alone takes more.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        products: Sequence[Facts],
        folder: Path,
        options: WriteOptions,
        limit_bytes: int,
    ) -> None:
        self._windows = windows
        self._products = products
        self._folder = folder
        self._options = options
        self._limit = limit_bytes
        self._files: WriteWindows | None = None
        self._writer: ShardWriter | None = None
        # The window that is filled: none before the first and after the last.
        self._window: Window | None = None
        self._places: dict[int, tuple[Buffer, Place]] = {}

    def turn_to(self, window: int) -> None:
        """Hand in what is filled, and begin to fill another window."""
        upcoming = self._windows[window]
        if self._window is upcoming:
            return
        if self._files is None:
            files = {one.file.name: one.file for one in self._windows}
            self._writer = open_writer(self._folder, list(files.values()), self._options)
            self._files = WriteWindows(self._writer, self._limit)
        # What is filled must not be held on to while room is waited for.
        self._places = {}
        span = upcoming.span
        buffer = self._files.turn_to(span)
        if span.start == 0:
            memoryview(buffer.image)[: len(upcoming.file.header)] = upcoming.file.header
        self._window = upcoming
        for entry in upcoming.entries:
            _, shape, dtype = self._products[entry.product]
            place = Place(entry.start - span.start, entry.stop - span.start, dtype, shape)
            self._places[entry.product] = buffer, place

    def view_of(self, product: int) -> torch.Tensor:
        """The place of a product in the window that is being filled."""
        buffer, place = self._places[product]
        return buffer.view(place)

    def put(self, product: int, tensor: torch.Tensor) -> None:
        """Copy a product to its place."""
        buffer, place = self._places[product]
        copies = Copies([Block(buffer=buffer, places=Places([place]), sources=[tensor])])
        copies.run()
        copies.wait(None)

    def finish(self) -> list[FileMetadata]:
        """Write what is left and block until everything is durable."""
        if self._files is None or self._writer is None:
            return []
        self._places = {}
        with finishing(self._writer, self._options):
            self._files.hand_in()
            return self._writer.finish()

    def abort(self) -> None:
        """Stop writing and give all memory back; harms nothing that is durable."""
        self._places = {}
        if self._writer is not None:
            self._writer.abort()
        if self._files is not None:
            self._files.release()


class WrittenExport:
    """A `tundish.checkpoint.save.Staged` that is on its way to the disk already."""

    def __init__(self, *, sink: WindowSink, sidecars: Sidecars | None, weights: Sequence[str]) -> None:
        self._sink = sink
        self._sidecars = sidecars
        self._weights = frozenset(weights)

    def wait_staged(self, timeout: float | None) -> None:
        """Nothing is left to wait for."""

    def settle(self) -> None:
        """Nothing: the caller's call returned when everything was copied."""

    def prewrite(self, folder: Path) -> list[FileMetadata]:
        """Write everything but the weights."""
        return [] if self._sidecars is None else self._sidecars.write(folder, self._weights)

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:  # noqa: ARG002 (where it began to write)
        """Block until this rank's files are durable."""
        return self._sink.finish()

    def break_off(self) -> None:
        """No other rank waits for this one any more."""

    def release(self) -> None:
        """Stop what is still written and give all memory back."""
        self._sink.abort()
        if self._sidecars is not None:
            self._sidecars.release()
