"""Host memory that a save is staged in.

Owns the buffers of one save, of either kind. What always holds: a buffer is given back once, whatever happened to
it; buffers that a CUDA device copies into are pinned as long as they are kept, where the system lets them be, and
pinned ones are kept for the next save, since pinning costs more than a copy; no memory is given back to the system
while it is pinned. What is kept goes when `trim` is called.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tundish._native import FileImage, TensorSpans, trim_staging
from tundish.waiting import to_its_end

__all__ = ["Buffer", "Place", "Places", "trim", "unpin"]

_logger = logging.getLogger("tundish.checkpoint")

_PORTABLE = 1
# All that is pinned, by address: memory that went back while a device still knows of it would be another's next, and
# the device would copy into pages that are gone.
_registered: dict[int, FileImage] = {}
# What of it no buffer uses.
_pinned: list[FileImage] = []
_pinned_lock = threading.Lock()


class Place(NamedTuple):
    """Where a tensor lies in a buffer: bytes `start` … `stop` - 1."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: Sequence[int]


class Places(tuple[Place, ...]):
    """Places of one buffer, in its order and without overlap."""

    @functools.cached_property
    def spans(self) -> TensorSpans:
        """As `FileImage.fill` takes them; made once, as the places of a file are the same in each save."""
        return TensorSpans(self)

    @functools.cached_property
    def stops_before(self) -> list[int]:
        """Of each, where the one before it stops; of the first, where that starts itself."""
        return [place.start for place in self[:1]] + [place.stop for place in self[:-1]]


class Buffer:
    """`size` bytes of host memory; `is_pinned` for copies from a CUDA device, which wait for it where it cannot be.

    `image`: for whoever writes it to a disk.
    """

    def __init__(self, size: int, *, is_pinned: bool = False) -> None:
        self.image: FileImage
        self.image, self._is_pinned = _take_pinned(size) if is_pinned else (FileImage(size), False)

    @functools.cached_property
    def bytes(self) -> torch.Tensor:
        """The memory as a tensor of bytes; none after `release`."""
        return torch.frombuffer(self.image, dtype=torch.uint8)

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


def _take_pinned(size: int) -> tuple[FileImage, bool]:
    """Memory for a device to copy into, and whether it is pinned."""
    with _pinned_lock:
        for place, image in enumerate(_pinned):
            if image.size == size:
                return _pinned.pop(place), True
        # What is kept belongs to another layout, which is not saved any more.
        _unpin()
    image = FileImage(size)
    try:
        # Which takes some fifty milliseconds a gigabyte, and is to be whole: the device's note, and ours.
        to_its_end(lambda: _register(image))
    except BaseException:
        with _pinned_lock:
            _pinned.extend(filter(None, [_registered.get(image.address)]))
        raise
    return image, image.address in _registered


def _register(image: FileImage) -> None:
    """Pin an image, where the system lets it be."""
    # The runtime would have its pages made one by one, on one thread.
    image.populate()
    with _on_device_in_use():
        try:
            torch.cuda.check_error(_runtime().cudaHostRegister(image.address, image.size, _PORTABLE))
        except torch.cuda.CudaError as error:
            _forget_error()
            _tell_unpinned(image.size, str(error))
        else:
            _registered[image.address] = image


@functools.cache
def _tell_unpinned(size: int, reason: str) -> None:
    # Once of each size, which is the same in every save.
    _logger.warning(
        "%d bytes of host memory cannot be pinned (%s): saves wait for their copies from the device",
        size,
        reason,
    )


def trim() -> None:
    """Give back to the system what is kept for the next save."""
    unpin()
    trim_staging()


def unpin() -> None:
    """Keep nothing pinned: what is kept may be used for any buffer from here on."""
    with _pinned_lock:
        _unpin()


def _unpin() -> None:
    if not _pinned:
        return
    try:
        while _pinned:
            to_its_end(_unregister)
    except RuntimeError as error:
        # After an error of the device, which ended all that it had: whoever closes then is to hear of that one.
        _logger.warning(
            "pinned memory is kept to the end of the process, as it cannot be unpinned: %s", error
        )
        _pinned.clear()


def _unregister() -> None:
    """Unpin what was kept last. Under the lock."""
    with _on_device_in_use():
        torch.cuda.check_error(_runtime().cudaHostUnregister(_pinned[-1].address))
    del _registered[_pinned.pop().address]


def _on_device_in_use() -> contextlib.AbstractContextManager[object]:
    """A device that this process uses: on any other, as is the first for new threads, memory is taken to call it."""
    here = torch.cuda.current_device()
    places = [here, *range(torch.cuda.device_count())]
    is_used = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # not in the stubs
    return torch.cuda.device(next(filter(is_used, places), here))


def _forget_error() -> None:
    """Take back what the runtime keeps of an error for the next kernel of the thread, which would fail with it."""
    with contextlib.suppress(RuntimeError):
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # torch leaves it so


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
