"""Files in memory, byte by byte as they will lie on the disk.

Owns the images of one rank's files, and of anything else that is staged beside them. What always holds: an image
is given back once, whatever happened to it; images that a CUDA device copies into are pinned as long as they are
kept, and pinned ones are kept for the next save, since pinning costs more than a copy.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tundish._native import Image
from tundish.checkpoint.shards import Entry, ShardFile
from tundish.checkpoint.tensors import Facts

__all__ = ["Buffer", "FileImage"]

_PORTABLE = 1
_pinned: list[Image] = []
_pinned_lock = threading.Lock()


class Buffer:
    """`size` bytes of host memory; `is_pinned` for copies from a CUDA device.

    `image`: for whoever writes it to a disk. `bytes`: the same memory as a tensor of bytes.
    """

    def __init__(self, size: int, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self.image: Image = _take_pinned(size) if is_pinned else Image(size)
        self.bytes: torch.Tensor = torch.frombuffer(self.image, dtype=torch.uint8)

    def view(self, start: int, stop: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Bytes `start` … `stop` - 1 as a tensor."""
        return self.bytes[start:stop].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Give the memory back; views of it must not be used any more. Does nothing the second time."""
        if hasattr(self, "image"):
            if self._is_pinned:
                with _pinned_lock:
                    _pinned.append(self.image)
            del self.image, self.bytes


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


def _take_pinned(size: int) -> Image:
    with _pinned_lock:
        for place, image in enumerate(_pinned):
            if image.size == size:
                return _pinned.pop(place)
        # What is kept belongs to another layout, which is not saved any more.
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
        while _pinned:
            torch.cuda.check_error(runtime.cudaHostUnregister(_pinned[-1].address))
            _pinned.pop()
    image = Image(size)
    torch.cuda.check_error(runtime.cudaHostRegister(image.address, size, _PORTABLE))
    return image
