"""Puts gathered tensors into the buffers of a rank's files."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from tundish.checkpoint.hf.gather.schedule import ROUND_BYTES
from tundish.checkpoint.hf.shards import ShardBuffer
from tundish.checkpoint.staging.buffers import Places
from tundish.checkpoint.staging.copies import EagerCopy
from tundish.checkpoint.staging.tensor_copy import Block

__all__ = ["FileSink"]

# Most bytes on their way from devices, unless one product is larger: they take memory on the device.
_MOST_BYTES_UNDER_WAY = 2 * ROUND_BYTES


class FileSink:
    """Copies products to their places in files.

    Args:
        buffers: of this rank's files.
        copies: gets the copies that may still be under way.
    """

    def __init__(self, buffers: Sequence[ShardBuffer], copies: list[EagerCopy]) -> None:
        self._places = {
            entry.product: (buffer, place)
            for buffer in buffers
            for entry, place in zip(buffer.file.entries, buffer.file.places, strict=True)
        }
        self._copies = copies
        # The copies that may still be under way, and the bytes of each.
        self._under_way: deque[tuple[EagerCopy, int]] = deque()
        self._bytes_under_way = 0

    def view_of(self, product: int) -> torch.Tensor:
        """The place of a product in host memory."""
        buffer, place = self._places[product]
        return buffer.view(place)

    def put(self, product: int, tensor: torch.Tensor) -> None:
        """Copy a whole product to its place; from a CUDA device, queue the copy."""
        buffer, place = self._places[product]
        copy = EagerCopy([Block(buffer=buffer, places=Places([place]), sources=[tensor])])
        if tensor.is_cuda:
            self._copies.append(copy)
        copy.run()
        copy.hold_up_streams()
        if tensor.is_cuda:
            self._under_way.append((copy, tensor.nbytes))
            self._bytes_under_way += tensor.nbytes
            self._wait_down_to(_MOST_BYTES_UNDER_WAY)

    def wait(self) -> None:
        """Block until everything is in its place."""
        self._wait_down_to(0)

    def _wait_down_to(self, most: int) -> None:
        while self._bytes_under_way > most:
            copy, size = self._under_way[0]
            copy.wait(None)
            self._under_way.popleft()
            self._bytes_under_way -= size
