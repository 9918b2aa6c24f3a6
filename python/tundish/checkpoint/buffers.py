"""Host memory for staging: buffers, pinned where a CUDA device copies into them, and the limit of their bytes.

Pinned buffers are kept for the next save, since pinning costs more than a copy. `trim` gives them back.

Invariants:
    - Memory is unpinned before it goes back to the system.
    - A buffer is given back once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from typing import Any

import torch

from tundish._native import FileImage, trim_staging
from tundish.checkpoint.write_plan import Place
from tundish.errors import InvalidInputError

_logger = logging.getLogger("tundish.checkpoint")

# Files are written past the page cache in multiples of this.
PAGE = 4096

_PORTABLE = 1
# All pinned memory, by address. If it were freed while it is pinned, devices would copy into freed pages.
_registered: dict[int, FileImage] = {}
# The pinned memory that no buffer uses.
_pinned: list[FileImage] = []
_pinned_lock = threading.Lock()


class Buffer:
    """`size` bytes of host memory.

    Attributes:
        image: the memory, for the shard writer.
    """

    def __init__(self, size: int, *, is_pinned: bool = False) -> None:
        self.image: FileImage
        self.image, self._is_pinned = _take_pinned(size) if is_pinned else (FileImage(size), False)

    @functools.cached_property
    def bytes(self) -> torch.Tensor:
        """The memory as a tensor of bytes; not after `release`."""
        return torch.frombuffer(self.image, dtype=torch.uint8)

    def view(self, place: Place) -> torch.Tensor:
        """A place as a tensor."""
        return self.bytes[place.start : place.stop].view(place.dtype).view(tuple(place.shape))

    def release(self) -> None:
        """Give the memory back; its views must not be used any more. Does nothing the second time."""
        held = self.__dict__
        held.pop("bytes", None)
        image = held.pop("image", None)
        if image is not None and self._is_pinned:
            with _pinned_lock:
                _pinned.append(image)


def _take_pinned(size: int) -> tuple[FileImage, bool]:
    """Memory that a device copies into, and whether it is pinned."""
    with _pinned_lock:
        for place, image in enumerate(_pinned):
            if image.size == size:
                return _pinned.pop(place), True
        # The kept memory is of another model.
        _unpin()
    image = FileImage(size)
    return image, _pin(image)


def _pin(image: FileImage) -> bool:
    """Pin the memory; returns whether the system allows it."""
    # Else the runtime faults the pages in one by one, on one thread.
    image.populate()
    with _on_device_in_use():
        _registered[image.address] = image
        try:
            torch.cuda.check_error(_runtime().cudaHostRegister(image.address, image.size, _PORTABLE))
        except torch.cuda.CudaError as error:
            del _registered[image.address]
            _forget_error()
            _warn_unpinned(image.size, str(error))
            return False
        except BaseException:
            # Ctrl-C, perhaps after it was pinned: kept as pinned, so that it is not freed while it is pinned.
            with _pinned_lock:
                _pinned.append(image)
            raise
    return True


@functools.cache
def _warn_unpinned(size: int, reason: str) -> None:
    # Once for each size, which is the same in every save.
    _logger.warning(
        "%d bytes of host memory cannot be pinned (%s): saves wait for their copies from the device",
        size,
        reason,
    )


def trim() -> None:
    """Free the memory that is kept for the next save."""
    with _pinned_lock:
        _unpin()
    trim_staging()


def _unpin() -> None:
    """Unpin and free the memory that no buffer uses. Call it under the lock."""
    if not _pinned:
        return
    try:
        with _on_device_in_use():
            while _pinned:
                torch.cuda.check_error(_runtime().cudaHostUnregister(_pinned[-1].address))
                del _registered[_pinned.pop().address]
    except RuntimeError as error:
        # The device had an error, which is raised elsewhere.
        _logger.warning(
            "pinned memory is kept to the end of the process, as it cannot be unpinned: %s", error
        )
        _pinned.clear()


def _on_device_in_use() -> contextlib.AbstractContextManager[object]:
    """Switch to a device that this process uses: a call on another device takes memory there."""
    here = torch.cuda.current_device()
    places = [here, *range(torch.cuda.device_count())]
    is_used = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # not in the stubs
    return torch.cuda.device(next(filter(is_used, places), here))


def _forget_error() -> None:
    """Clear the runtime's last error, with which the thread's next kernel would fail."""
    with contextlib.suppress(RuntimeError):
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # torch leaves it so


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so


class StagingBudget:
    """Bytes that all saves of a rank may stage together.

    Args:
        limit: the most bytes; None sets no limit.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidInputError(f"staging_limit_bytes is {limit!r}: give a number of bytes, or None")
        self.limit = limit
        self._in_use = 0
        self._peak = 0
        self._changed = threading.Condition()

    def stats(self) -> dict[str, int | None]:
        """Bytes in use, the most there ever were, and the limit."""
        with self._changed:
            return {
                "staging_in_use_bytes": self._in_use,
                "staging_peak_bytes": self._peak,
                "staging_limit_bytes": self.limit,
            }

    def take(self, count: int, what: str, *, may_wait: bool = True) -> bool:
        """Take bytes for a save. Waits until earlier saves give back enough, with a warning in the log.

        Args:
            count: how many bytes.
            what: the save, for messages.
            may_wait: else it takes nothing where it would have to wait.

        Returns:
            Whether the bytes were taken.

        Raises:
            InvalidInputError: `count` is more than the limit.
        """
        if self.limit is not None and count > self.limit:
            raise InvalidInputError(
                f"{what} stages {count} bytes of host memory on this rank, more than staging_limit_bytes="
                f"{self.limit}: raise the limit, or save from more ranks"
            )
        with self._changed:
            if not self._has_room(count):
                if not may_wait:
                    return False
                started = time.monotonic()
                _logger.warning(
                    "%s waits for the save before it: it stages %d bytes, and %d of staging_limit_bytes=%s are in use",
                    what,
                    count,
                    self._in_use,
                    self.limit,
                )
                self._changed.wait_for(lambda: self._has_room(count))
                _logger.warning("%s waited %.3f s", what, time.monotonic() - started)
            self._in_use += count
            self._peak = max(self._peak, self._in_use)
        return True

    def give_back(self, count: int) -> None:
        """Give back bytes that were taken."""
        with self._changed:
            self._in_use -= count
            self._changed.notify_all()

    def _has_room(self, count: int) -> bool:
        return self.limit is None or self._in_use + count <= self.limit
