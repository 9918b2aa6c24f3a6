"""Host memory that a save is staged in.

Owns the buffers of one save, of either kind. What always holds: a buffer is given back once, whatever happened to
it; buffers that a CUDA device copies into are pinned as long as they are kept, and pinned ones are kept for the next
save, since pinning costs more than a copy. What is kept goes when `trim` is called.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tundish._native import Image, trim_staging

__all__ = ["Buffer", "Place", "trim"]

_PORTABLE = 1
_pinned: list[Image] = []
_pinned_lock = threading.Lock()


class Place(NamedTuple):
    """Where a tensor lies in a buffer: bytes `start` … `stop` - 1."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: Sequence[int]


class Buffer:
    """`size` bytes of host memory; `is_pinned` for copies from a CUDA device.

    `image`: for whoever writes it to a disk. `bytes`: the same memory as a tensor of bytes.
    """

    def __init__(self, size: int, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self.image: Image = _take_pinned(size) if is_pinned else Image(size)
        self.bytes: torch.Tensor = torch.frombuffer(self.image, dtype=torch.uint8)

    def view(self, place: Place) -> torch.Tensor:
        """A place as a tensor."""
        return self.bytes[place.start : place.stop].view(place.dtype).view(tuple(place.shape))

    def release(self) -> None:
        """Give the memory back; views of it must not be used any more. Does nothing the second time."""
        held = self.__dict__
        held.pop("bytes", None)
        if self._is_pinned:
            # In one call, which Ctrl-C does not divide: what is pinned must neither be lost nor be kept twice.
            with _pinned_lock:
                _pinned.extend(map(held.pop, held.keys() & {"image"}))
        else:
            held.pop("image", None)


def _take_pinned(size: int) -> Image:
    with _pinned_lock:
        for place, image in enumerate(_pinned):
            if image.size == size:
                return _pinned.pop(place)
        # What is kept belongs to another layout, which is not saved any more.
        _unpin()
    image = Image(size)
    torch.cuda.check_error(_runtime().cudaHostRegister(image.address, size, _PORTABLE))
    return image


def trim() -> None:
    """Give back to the system what is kept for the next save."""
    with _pinned_lock:
        _unpin()
    trim_staging()


def _unpin() -> None:
    while _pinned:
        torch.cuda.check_error(_runtime().cudaHostUnregister(_pinned[-1].address))
        _pinned.pop()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
