"""A Hugging Face export in host memory, and its way to the disk.

Owns what a save holds between staging and the end of its writing. What always holds: memory is given back once, by
`release`; what is gathered in the background is gathered before any file is opened, so that a rank that writes never
holds up one that gathers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tundish._native import FileMetadata, ShardWriter
from tundish.checkpoint.hf.file_image import FileImage
from tundish.checkpoint.hf.gather.exchange import TURN_BYTES, Batch, Gather
from tundish.checkpoint.hf.shards import ShardFile
from tundish.checkpoint.hf.sidecars import Sidecars
from tundish.checkpoint.publish.shard_writing import finishing
from tundish.checkpoint.save import WriteOptions
from tundish.checkpoint.staging.buffers import Buffer, Places
from tundish.checkpoint.staging.copies import BackgroundCopy, Copies
from tundish.checkpoint.staging.tensor_copy import Block
from tundish.timeouts import deadline_of

__all__ = ["ImageSink", "Later", "StagedExport", "open_writer"]

# What may be on its way from devices at a time, unless one product is larger: it takes memory there, of which the
# training may have left little.
_MOST_LEAVING = 2 * TURN_BYTES


@dataclass(frozen=True, kw_only=True)
class Later:
    """What is brought together in the background: collective, over `rounds` into `sink`."""

    gather: Gather
    rounds: Sequence[Sequence[Batch]]
    sink: ImageSink

    def run(self) -> None:
        """Bring it together."""
        try:
            self.gather.run(self.rounds, self.sink)
        finally:
            # A conversion may make its products on a device.
            self.sink.wait()


class StagedExport:
    """A `tundish.checkpoint.save.Staged` whose files are in memory, or will be before they are written.

    Args:
        images: this rank's files.
        held: what else it holds until it is written.
        copies: under way into host memory.
        later: brings together what is not in `images` yet. None where all is.
        sidecars: on the rank that writes them.
        weights: names of all files with weights, of all ranks.
    """

    def __init__(
        self,
        *,
        images: Sequence[FileImage],
        held: Sequence[Buffer],
        copies: Sequence[Copies | BackgroundCopy],
        later: Later | None,
        sidecars: Sidecars | None,
        weights: Sequence[str],
    ) -> None:
        self._images = images
        self._held = held
        self._copies = copies
        self._later = later
        self._sidecars = sidecars
        self._weights = frozenset(weights)

    def wait_staged(self, timeout: float | None) -> None:
        """Block until host memory holds everything that this rank has to give."""
        deadline = deadline_of(timeout)
        for copies in self._copies:
            copies.wait(deadline)

    def settle(self) -> None:
        """The caller was told that everything is in host memory, and may change its tensors from here on."""
        for copies in self._copies:
            copies.settle()

    def prewrite(self, folder: Path) -> list[FileMetadata]:
        """Write everything but the weights."""
        return [] if self._sidecars is None else self._sidecars.write(folder, self._weights)

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Write this rank's files and block until they are durable."""
        if self._later is not None:
            self._later.run()
            self._later = None
        facts = self._written(folder, options) if self._images else []
        for copies in self._copies:
            copies.confirm()
        return facts

    def break_off(self) -> None:
        """Do not write, while other ranks may: those that wait for this one fail at once."""
        if self._later is not None:
            self._later.gather.break_off()

    def release(self) -> None:
        """Give all memory back, once nothing is copied into it any more."""
        self._later = None
        for copies in self._copies:
            # Whatever went wrong with them was raised where they were waited for.
            with contextlib.suppress(Exception):
                copies.wait(None)
            copies.let_go()
        for buffer in (*self._images, *self._held):
            buffer.release()
        if self._sidecars is not None:
            self._sidecars.release()

    def _written(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        writer = open_writer(folder, [image.file for image in self._images], options)
        with finishing(writer, options):
            for image in self._images:
                writer.write(image.file.name, 0, image.image, 0, image.file.size)
            return writer.finish()


class ImageSink:
    """Puts products into the images of whole files. `copies`: gets those that may still be under way."""

    def __init__(self, images: Sequence[FileImage], copies: list[Copies]) -> None:
        self._places = {
            entry.product: (image, place)
            for image in images
            for entry, place in zip(image.file.entries, image.file.places, strict=True)
        }
        self._copies = copies
        # Those that may still be under way, and the bytes of each.
        self._leaving: deque[tuple[Copies, int]] = deque()
        self._leaving_bytes = 0

    def turn_to(self, window: int) -> None:
        """All windows are one."""

    def view_of(self, product: int) -> torch.Tensor:
        """The place of a product."""
        image, place = self._places[product]
        return image.view(place)

    def put(self, product: int, tensor: torch.Tensor) -> None:
        """Copy a product to its place; on a CUDA device, begin to."""
        image, place = self._places[product]
        copies = Copies([Block(buffer=image, places=Places([place]), sources=[tensor])])
        if tensor.is_cuda:
            self._copies.append(copies)
        copies.run()
        copies.hold_up_caller()
        if tensor.is_cuda:
            self._leaving.append((copies, tensor.nbytes))
            self._leaving_bytes += tensor.nbytes
            self._wait_down_to(_MOST_LEAVING)

    def wait(self) -> None:
        """Block until all that was put is in its place."""
        self._wait_down_to(0)

    def _wait_down_to(self, most: int) -> None:
        while self._leaving_bytes > most:
            copies, size = self._leaving[0]
            copies.wait(None)
            self._leaving.popleft()
            self._leaving_bytes -= size


def open_writer(folder: Path, files: Sequence[ShardFile], options: WriteOptions) -> ShardWriter:
    """A writer of `files`, which are there at their full size when this returns."""
    return ShardWriter(
        folder,
        [(file.name, file.size) for file in files],
        checksum=options.checksum,
        writers_per_node=options.writers_per_node,
    )
