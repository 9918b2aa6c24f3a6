"""Pinned memory and Ctrl-C, on a machine without a device: the runtime's calls are played, and so take their time."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tundish import _native
from tundish.checkpoint import buffers


class Runtime:
    """Records pinned memory; `interrupts`: whether Ctrl-C comes while it pins."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.interrupts = False
        self.resident = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.pinned
        self.resident = resident_bytes()
        self.pinned.add(address)
        if self.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            # Time for it to be raised, if it can be here.
            threading.Event().wait(0.2)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


def resident_bytes() -> int:
    """The resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = Runtime()
    monkeypatch.setattr(buffers, "_runtime", lambda: runtime)
    monkeypatch.setattr(buffers, "_on_device_in_use", contextlib.nullcontext)
    monkeypatch.setattr(buffers.torch.cuda, "check_error", lambda status: None)
    yield runtime
    # The exception holds its frames.
    gc.collect()
    buffers.trim()
    assert not runtime.pinned
    assert _native.staging_stats()["in_use"] == 0


def test_memory_is_pinned_once_and_freed_unpinned(runtime: Runtime) -> None:
    first = buffers.Buffer(1 << 20, is_pinned=True)
    address = first.image.address
    first.release()
    again = buffers.Buffer(1 << 20, is_pinned=True)
    assert again.image.address == address
    assert runtime.pinned == {address}
    again.release()
    # Of another size: what is kept is of no use any more.
    other = buffers.Buffer(3 << 20, is_pinned=True)
    assert runtime.pinned == {other.image.address}
    other.release()


def test_pages_are_populated_before_pinning(runtime: Runtime) -> None:
    buffers.trim()
    before = resident_bytes()
    buffers.Buffer(300 << 20, is_pinned=True).release()
    assert runtime.resident - before >= 290 << 20


def test_memory_stays_registered_if_ctrl_c_interrupts_pinning(runtime: Runtime) -> None:
    runtime.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        buffers.Buffer(1 << 20, is_pinned=True)
    runtime.interrupts = False
    (address,) = runtime.pinned
    # Not given back, where it would be the next image's though the device knows of it.
    with contextlib.closing(contextlib.ExitStack()) as stack:
        plain = buffers.Buffer(1 << 20)
        stack.callback(plain.release)
        assert plain.image.address != address
        pinned = buffers.Buffer(1 << 20, is_pinned=True)
        stack.callback(pinned.release)
        assert pinned.image.address == address
