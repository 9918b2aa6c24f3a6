"""Puts gathered tensors into the buffers of a rank's files."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from tundish.checkpoint.hf.gather.schedule import ROUND_BYTES
from tundish.checkpoint.hf.shards import ShardBuffer
from tundish.checkpoint.staging.buffer_copy import BufferCopy
from tundish.checkpoint.staging.copies import Copies, EagerCopy

__all__ = ["FileSink"]

# Most bytes of running copies from devices, unless one product is larger: they take memory on the device.
_MOST_RUNNING_BYTES = 2 * ROUND_BYTES


class FileSink:
    """Copies products to their places in files.

    Args:
        buffers: of this rank's files.
        copies: gets the copies from devices.
    """

    def __init__(self, buffers: Sequence[ShardBuffer], copies: Copies) -> None:
        self._places = {
            product: (buffer, place)
            for buffer in buffers
            for product, place in zip(buffer.file.products, buffer.file.places, strict=True)
        }
        self._copies = copies
        # The copies that may still run, and the bytes of each.
        self._running: deque[tuple[EagerCopy, int]] = deque()
        self._running_bytes = 0

    def view_of(self, product: int) -> torch.Tensor:
        """The place of a product in host memory."""
        buffer, place = self._places[product]
        return buffer.view(place)

    def put(self, product: int, tensor: torch.Tensor) -> None:
        """Copy a whole product to its place; from a CUDA device, queue the copy."""
        buffer, place = self._places[product]
        copy = EagerCopy([BufferCopy(buffer=buffer, places=[place], sources=[tensor], names=["a product"])])
        if tensor.is_cuda:
            self._copies.add(copy)
        copy.run()
        copy.hold_up_streams()
        if tensor.is_cuda:
            self._running.append((copy, tensor.nbytes))
            self._running_bytes += tensor.nbytes
            self.wait(_MOST_RUNNING_BYTES)

    def wait(self, most: int = 0) -> None:
        """Block until at most this many bytes are still copied."""
        while self._running_bytes > most:
            copy, size = self._running[0]
            copy.wait(None)
            self._running.popleft()
            self._running_bytes -= size
