"""Files that claim to be segments, and handles that cannot be: refused, whatever they say."""

from __future__ import annotations

import os
from typing import Any

import pytest

import tundish as td
from tundish.shm import Handle, SharedArray


def forge(header: bytes, size: int, *, seal: bool = True) -> tuple[int, Handle]:
    """A file that claims to be a segment."""
    import fcntl

    descriptor = os.memfd_create("forged", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.truncate(descriptor, size)
    os.pwrite(descriptor, header, 0)
    if seal:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor, Handle((os.getpid(), descriptor, 77, 1))


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


ONE_BYTE = b'{"shape":[1],"order":"C","dtype":"|u1"}'


@pytest.mark.parametrize(
    ("page", "size", "says"),
    [
        (header(magic=b"tundish\x02"), 8192, "no segment of this library and version"),
        (header(), 4095, "less than a header"),
        (header(data=4097, layout=ONE_BYTE), 8192, "claims 4097 bytes and it has 4096"),
        (header(data=2**64 - 1, layout=ONE_BYTE), 8192, "and it has 4096"),
        (header(data=1, claims=3073), 8192, "a description of 3073 bytes"),
        (header(data=8, layout=b'{"shape":[1],"order":"C","dtype":"|O"}'), 8192, "cannot be read"),
        (header(data=1, layout=b"not json"), 8192, "cannot be read"),
        (header(data=1, layout=b"[]"), 8192, "cannot be read"),
        (header(data=1, layout=b"[" * 2500), 8192, "cannot be read"),
        (header(data=1, layout=ONE_BYTE.replace(b"[1]", b"[1e400]")), 8192, "cannot be read"),
        (header(data=1, layout=ONE_BYTE.replace(b"[1]", b"[" + b"1," * 64 + b"1]")), 8192, "cannot be read"),
        (header(data=8, layout=ONE_BYTE), 8192, "holds 8 bytes, and its layout says"),
        (header(data=1, layout=ONE_BYTE.replace(b"[1]", b"[-1]")), 8192, "its layout"),
    ],
)
def test_what_only_claims_to_be_a_segment_is_refused(page: bytes, size: int, says: str) -> None:
    descriptor, handle = forge(page, size)
    try:
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=says) as caught:
            SharedArray.attach(handle)
        assert isinstance(caught.value, td.TundishError)
    finally:
        os.close(descriptor)


def test_a_dtype_of_torch_that_is_none_is_refused() -> None:
    descriptor, handle = forge(header(data=1, layout=ONE_BYTE[:-1] + b',"torch":"load"}'), 8192)
    try:
        with pytest.raises(td.errors.InvalidTypeError, match="torch has no dtype 'load'"):
            SharedArray.attach(handle).tensor()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "parts",
    [
        (-1, 3, 5, 1, None),
        (1 << 40, 3, 5, 1, None),
        (1, 1 << 40, 5, 1, None),
        (1, 3, 1 << 64, 1, None),
        (1, 3, 5, 1.5, None),
        (1, 3, None, 1, None),
        ("a", 3, 5, 1, None),
        (True, 3, 5, 1, None),
        (1, 3, 5, 1, 7),
        (1, 3, 5, 1, b"name"),
        (1, 3, 5, 1, "\ud800"),
        (1, 3, 5),
    ],
)
def test_a_handle_that_cannot_be_one_is_refused(parts: tuple[Any, ...]) -> None:
    with pytest.raises(td.errors.InvalidInputError, match="handle"):
        Handle.from_json(list(parts))
    with pytest.raises(td.errors.InvalidInputError, match="handle"):
        Handle(parts[:4], *parts[4:])


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
            SharedArray.attach(Handle((os.getpid(), reading, 1, 1)))
    finally:
        os.close(reading)
        os.close(writing)
    with pytest.raises(TypeError, match="give the handle of a SharedArray"):
        SharedArray.attach(3)  # type: ignore[arg-type]
