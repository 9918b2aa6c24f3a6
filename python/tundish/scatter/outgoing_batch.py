"""A batch to send: flattened into tensors and a schema, and written into one buffer."""

from __future__ import annotations

import pickle
from functools import cached_property
from typing import Any

import torch

from tundish import _native
from tundish.tensor_bytes import INTEGER_DTYPES
from tundish.tree import flatten_with_addresses

__all__ = ["OutgoingBatch", "copy_threads"]

# More threads do not make a copy faster.
_MAX_THREADS = 4


class OutgoingBatch:
    """A flattened batch.

    Attributes:
        schema: the batch without its tensors.
        tensors: the tensors that travel.
        size: bytes of the tensors in one buffer, as the schema's layout places them.
        is_contiguous: whether all tensors are contiguous and in host memory.
    """

    def __init__(self, batch: Any, rank: int, threads: int) -> None:
        self.tensors, self.schema, self._addresses = flatten_with_addresses(batch, f"rank {rank}'s batch")
        self.size = self.schema.layout.total
        self.is_contiguous = bool(self._addresses) or not self.tensors
        self._threads = threads

    @cached_property
    def encoded_schema(self) -> bytes:
        """The schema in bytes."""
        return pickle.dumps(self.schema, 5)

    def write(self, buffer: _native.SendBuffer) -> None:
        """Write the tensors to the first `size` bytes of a buffer in shared memory."""
        layout = self.schema.layout
        if self.is_contiguous:
            buffer.fill(self._addresses, layout.size_bytes, layout.offset_bytes, self._threads)
            return
        places = layout.tensors_in(torch.frombuffer(buffer, dtype=torch.uint8, count=self.size))
        for place, tensor in zip(places, self.tensors, strict=True):
            # As integers, since torch cannot copy tensors of every dtype.
            integer = INTEGER_DTYPES.get(tensor.itemsize)
            if integer is None:
                place.copy_(tensor)
            else:
                place.view(integer).copy_(tensor.view(integer))


def copy_threads(receivers: int) -> int:
    """How many threads copy a batch on a node with so many receivers."""
    return max(1, min(_MAX_THREADS, _native.available_processors() // max(1, receivers)))
