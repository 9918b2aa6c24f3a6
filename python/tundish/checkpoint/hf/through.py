"""Files that are larger than the memory there is for them, written through windows while the caller waits.

Owns the windows. What always holds: whatever the size of the files, no more than two windows are in memory, one that
is filled and one that is written; bytes reach a file in whole pages, but for its end, so that they can pass the
page cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tundish._native import FileFacts, Image, ShardWriter
from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.hf.export import open_writer
from tundish.checkpoint.hf.shards import PAGE, Entry, ShardFile
from tundish.checkpoint.hf.sidecars import Sidecars
from tundish.checkpoint.saves import WriteOptions
from tundish.checkpoint.staging import Copies
from tundish.checkpoint.tensors import Facts
from tundish.checkpoint.writing import finishing

__all__ = ["Window", "WindowSink", "WrittenExport", "windows_of"]

_POLL_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A stretch of a file: its header where it is the first, then `entries`, up to the end where it is the last."""

    file: ShardFile
    entries: tuple[Entry, ...]

    @property
    def start(self) -> int:
        """The first byte, rounded down to a page, whose beginning belongs to the window before."""
        first = self.entries[0].start
        return 0 if first == len(self.file.header) else first // PAGE * PAGE

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.entries[-1].stop

    @property
    def written_stop(self) -> int:
        """One past the last byte that can be written before the next window is filled."""
        return self.stop if self.stop == self.file.size else self.stop // PAGE * PAGE


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


class _Filling:
    """A window while it is filled."""

    def __init__(self, window: Window, products: Sequence[Facts], head: bytes) -> None:
        self.window = window
        self.buffer = Buffer(window.stop - window.start)
        memoryview(self.buffer.image)[: len(head)] = head
        self._products = products
        self._entries = {entry.product: entry for entry in window.entries}

    def view_of(self, product: int) -> torch.Tensor:
        entry, start = self._entries[product], self.window.start
        _, shape, dtype = self._products[product]
        return self.buffer.view(entry.start - start, entry.stop - start, dtype, shape)


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
        self._writer: ShardWriter | None = None
        # One, or none before the first and after the last.
        self._filling: list[_Filling] = []
        self._handed_in = 0

    def turn_to(self, window: int) -> None:
        """Hand in what is filled, and begin to fill another window."""
        upcoming = self._windows[window]
        if self._filling and self._filling[0].window is upcoming:
            return
        if self._writer is None:
            files = {one.file.name: one.file for one in self._windows}
            self._writer = open_writer(self._folder, list(files.values()), self._options)
        rest = self._hand_in(self._writer)
        self._wait_for_room(self._writer, upcoming)
        head = rest if upcoming.start else upcoming.file.header
        self._filling = [_Filling(upcoming, self._products, head)]

    def view_of(self, product: int) -> torch.Tensor:
        """The place of a product in the window that is being filled."""
        return self._filling[0].view_of(product)

    def put(self, product: int, tensor: torch.Tensor) -> None:
        """Copy a product to its place."""
        copies = Copies([(self.view_of(product), tensor)])
        copies.run()
        copies.wait(None)

    def finish(self) -> list[FileFacts]:
        """Write what is left and block until everything is durable."""
        if self._writer is None:
            return []
        with finishing(self._writer, self._options):
            self._hand_in(self._writer)
            return self._writer.finish()

    def abort(self) -> None:
        """Stop writing and give all memory back; harms nothing that is durable."""
        if self._writer is not None:
            self._writer.abort()
        self._filling = []

    def _hand_in(self, writer: ShardWriter) -> bytes:
        """Hand the window that was filled to the writer; the bytes that belong onto the first page of the next."""
        if not self._filling:
            return b""
        window, buffer = self._filling[0].window, self._filling[0].buffer
        length = window.written_stop - window.start
        writer.write(window.file.name, window.start, buffer.image, 0, length)
        self._handed_in += length
        self._filling = []
        return bytes(memoryview(buffer.image)[length : window.stop - window.start])

    def _wait_for_room(self, writer: ShardWriter, upcoming: Window) -> None:
        size = upcoming.stop - upcoming.start
        while self._handed_in - writer.progress()[0] > max(0, self._limit - size):
            # This hands nothing in, but raises what the writer failed with, which would be waited for without end.
            writer.write(upcoming.file.name, 0, Image(0), 0, 0)
            time.sleep(_POLL_SECONDS)


class WrittenExport:
    """A `tundish.checkpoint.saves.Staged` that is on its way to the disk already."""

    def __init__(self, *, sink: WindowSink, sidecars: Sidecars | None, weights: Sequence[str]) -> None:
        self._sink = sink
        self._sidecars = sidecars
        self._weights = frozenset(weights)

    def wait_staged(self, timeout: float | None) -> None:
        """Nothing is left to wait for."""

    def prewrite(self, folder: Path) -> list[FileFacts]:
        """Write everything but the weights."""
        return [] if self._sidecars is None else self._sidecars.write(folder, self._weights)

    def write(self, folder: Path, options: WriteOptions) -> list[FileFacts]:  # noqa: ARG002 (where it began to write)
        """Block until this rank's files are durable."""
        return self._sink.finish()

    def release(self) -> None:
        """Stop what is still written and give all memory back."""
        self._sink.abort()
