"""Files with forged headers of segments are refused."""

from __future__ import annotations

import os

import numpy as np
import pytest

import tundish as td
from tundish.shm import Handle, SharedArray
from tundish.shm.array_layout import ArrayLayout


def forge(header: bytes, size: int, *, seal: bool = True) -> tuple[int, Handle]:
    """A file with a forged header."""
    import fcntl

    descriptor = os.memfd_create("forged", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.truncate(descriptor, size)
    os.pwrite(descriptor, header, 0)
    if seal:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor, Handle(os.getpid(), descriptor, 77, 1)


def header(
    *, magic: bytes = b"tundish\x01", data: int = 0, layout: bytes = b"", claims: int | None = None
) -> bytes:
    words = [
        magic,
        (77).to_bytes(8, "little"),
        (1).to_bytes(8, "little"),
        bytes(16),
        data.to_bytes(8, "little"),
    ]
    page = b"".join(words).ljust(80, b"\0") + (len(layout) if claims is None else claims).to_bytes(
        8, "little"
    )
    return page.ljust(1024, b"\0") + layout


ONE_BYTE = ArrayLayout(shape=(1,), order="C", dtype=np.dtype("u1")).to_bytes()


@pytest.mark.parametrize(
    ("page", "size", "says"),
    [
        (header(magic=b"tundish\x02"), 8192, "no segment of this library and version"),
        (header(), 4095, "less than a header"),
        (header(data=4097, layout=ONE_BYTE), 8192, "claims 4097 bytes and it has 4096"),
        (header(data=2**64 - 1, layout=ONE_BYTE), 8192, "and it has 4096"),
        (header(data=1, claims=3073), 8192, "a description of 3073 bytes"),
        (header(data=8, layout=ONE_BYTE.replace(b"|u1", b"|O")), 8192, "cannot be parsed"),
        (header(data=8, layout=ONE_BYTE.replace(b"'|u1'", b"[('a', '|O')]")), 8192, "cannot be parsed"),
        (header(data=1, layout=b"no layout"), 8192, "cannot be parsed"),
        (header(data=1, layout=b"[]"), 8192, "cannot be parsed"),
        (header(data=1, layout=b"[" * 2500), 8192, "cannot be parsed"),
        (header(data=1, layout=ONE_BYTE.replace(b"(1,)", b"(1.5,)")), 8192, "cannot be parsed"),
        (header(data=1, layout=ONE_BYTE.replace(b"'C'", b"'K'")), 8192, "cannot be parsed"),
        (header(data=1, layout=ONE_BYTE.replace(b"None", b"3")), 8192, "cannot be parsed"),
        (header(data=8, layout=ONE_BYTE), 8192, "holds 8 bytes, and its layout says"),
        (header(data=1, layout=ONE_BYTE.replace(b"(1,)", b"(-1,)")), 8192, "cannot be parsed"),
    ],
)
def test_forged_segments_are_refused(page: bytes, size: int, says: str) -> None:
    descriptor, handle = forge(page, size)
    try:
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=says) as caught:
            SharedArray.attach(handle)
        assert isinstance(caught.value, td.TundishError)
    finally:
        os.close(descriptor)


def test_a_dtype_of_torch_that_is_none_is_refused() -> None:
    descriptor, handle = forge(header(data=1, layout=ONE_BYTE.replace(b"None", b"'load'")), 8192)
    try:
        with pytest.raises(td.errors.InvalidTypeError, match="torch has no dtype 'load'"):
            SharedArray.attach(handle).tensor()
    finally:
        os.close(descriptor)


def test_a_file_that_could_become_shorter_is_refused() -> None:
    page = header(data=1, layout=ONE_BYTE)
    descriptor, handle = forge(page, 8192)
    assert SharedArray.attach(handle).array.tolist() == [0]
    os.close(descriptor)
    descriptor, handle = forge(page, 8192, seal=False)
    try:
        with pytest.raises(td.errors.SegmentGoneError, match="it is not sealed"):
            SharedArray.attach(handle)
    finally:
        os.close(descriptor)


def test_a_pipe_behind_a_handle_is_not_opened() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(td.errors.SegmentGoneError, match="it is not a plain file"):
            SharedArray.attach(Handle(os.getpid(), reading, 1, 1))
    finally:
        os.close(reading)
        os.close(writing)
    with pytest.raises(TypeError, match="give the handle of a SharedArray"):
        SharedArray.attach(3)  # type: ignore[arg-type]
