"""A private `/dev/shm` for a test, which can be full and is seen by no other process."""

from __future__ import annotations

import ctypes
import multiprocessing.forkserver
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
FOLDER = Path("/dev/shm")

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of named segments, this test's own, which has to be empty in the end."""
    with private_shm(64 << 20) as folder:
        yield folder
        assert [path.name for path in folder.iterdir()] == []


@contextmanager
def private_shm(size: int) -> Iterator[Path]:
    """A tmpfs of `size` bytes on `/dev/shm`, for this thread and the processes that it starts meanwhile."""
    if os.geteuid() != 0:
        pytest.skip("only root may have mounts of its own")
    # A fork server that started in here would keep these mounts, and so would all processes that it forks.
    multiprocessing.forkserver.ensure_running()
    folder = os.getcwd()
    before = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call(_libc.unshare, CLONE_NEWNS)
        try:
            _call(_libc.mount, b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            _call(_libc.mount, b"tmpfs", bytes(FOLDER), b"tmpfs", 0, f"size={size},mode=1777".encode())
            yield FOLDER
        finally:
            # The mount goes with the last process in its namespace.
            _call(_libc.setns, before, CLONE_NEWNS)
            os.chdir(folder)
    finally:
        os.close(before)


def _call(function: ctypes._NamedFuncPointer, *arguments: object) -> None:
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
