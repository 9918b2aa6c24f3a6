"""The files of an export in memory, byte by byte as they will lie on the disk.

What always holds: an image has its header from the beginning, and the place of every tensor is a view into it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.hf.shards import Entry, ShardFile
from tundish.checkpoint.tensors import Facts

__all__ = ["FileImage"]


class FileImage(Buffer):
    """A whole file, with its header. `products`: names, shapes and dtypes of all products of the save."""

    def __init__(self, file: ShardFile, products: Sequence[Facts], *, is_pinned: bool = False) -> None:
        super().__init__(file.size, is_pinned=is_pinned)
        self.file = file
        self._products = products
        memoryview(self.image)[: len(file.header)] = file.header

    def view_of(self, entry: Entry) -> torch.Tensor:
        """Where the tensor of `entry` lies."""
        _, shape, dtype = self._products[entry.product]
        return self.view(entry.start, entry.stop, dtype, shape)

    def views(self) -> list[torch.Tensor]:
        """Where the tensors of all entries lie, in order; cheaper than asking for each."""
        views: list[torch.Tensor] = []
        # Tensors of one dtype lie side by side, and each begins at a multiple of its size.
        for dtype, run in itertools.groupby(
            self.file.entries, lambda entry: self._products[entry.product][2]
        ):
            entries = list(run)
            flat = self.bytes[entries[0].start : entries[-1].stop].view(dtype)
            for entry in entries:
                shape = self._products[entry.product][1]
                views.append(flat.as_strided(shape, _strides(shape), entry.start // dtype.itemsize))
        return views


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, size))
    return tuple(strides) if shape else ()
