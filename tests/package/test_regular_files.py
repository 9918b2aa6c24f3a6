"""Regular files are read; everything else is refused at once, by name."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from tundish.errors import InvalidInputError, NotFoundError, StorageError
from tundish.regular_files import open_regular_file, read_regular_file

WHAT = "a file with a token"


def test_a_regular_file_and_a_link_to_one_are_read_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("token")
    for path in (tmp_path / "token", str(tmp_path / "link")):
        assert read_regular_file(path, WHAT, limit_bytes=100) == b"x" * 100
        with open_regular_file(path, WHAT) as file:
            assert file.read(3) == b"xxx" and not os.get_inheritable(file.fileno())
            assert file.seek(98) == 98 and file.read() == b"xx"


def test_a_file_of_the_kernel_without_a_size_is_read() -> None:
    assert read_regular_file("/proc/self/stat", WHAT, limit_bytes=10_000).startswith(
        str(os.getpid()).encode()
    )


def test_a_file_that_cannot_be_read_is_named() -> None:
    # Nothing is mapped at address 0.
    path = "/proc/self/mem"
    says = f"{path}: cannot be read: Input/output error"
    with pytest.raises(StorageError, match=says):
        read_regular_file(path, WHAT, limit_bytes=100)
    reads: list[Callable[[BinaryIO], object]] = [
        lambda file: file.read(8),
        lambda file: file.read(),
        lambda file: file.readline(),
        list,
    ]
    for read in reads:
        with open_regular_file(path, WHAT) as file, pytest.raises(StorageError, match=says):
            read(file)


@pytest.mark.parametrize("kind", ["FIFO", "socket", "folder", "device"])
@pytest.mark.parametrize("linked", [False, True])
def test_others_are_refused_by_name_without_waiting(tmp_path: Path, kind: str, linked: bool) -> None:
    path = tmp_path / "other"
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "socket":
            listener.bind(str(path))
        elif kind == "folder":
            path.mkdir()
        else:
            path = Path("/dev/zero")
        if linked:
            (tmp_path / "link").symlink_to(path)
            path = tmp_path / "link"
        says = f"^{re.escape(str(path))}: is a {kind}; give a file with a token, as a regular file$"
        with pytest.raises(InvalidInputError, match=says):
            open_regular_file(path, WHAT)
        with pytest.raises(InvalidInputError, match=says):
            read_regular_file(path, WHAT, limit_bytes=100)
        assert not _is_open(path)


def test_a_fifo_with_a_writer_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    try:
        os.write(writer, b"secret")
        with pytest.raises(InvalidInputError, match="is a FIFO"):
            read_regular_file(path, WHAT, limit_bytes=100)
        assert os.read(reader, 100) == b"secret"
    finally:
        os.close(reader)
        os.close(writer)


def test_too_large_missing_and_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(
        InvalidInputError, match=rf"^{large}: has more than 100 bytes; give a file with a token$"
    ):
        read_regular_file(large, WHAT, limit_bytes=100)
    for missing in (tmp_path / "missing", large / "below"):
        with pytest.raises(
            NotFoundError, match=rf"{missing}: does not exist; give a file with a token$"
        ) as raised:
            read_regular_file(missing, WHAT, limit_bytes=100)
        assert raised.value.filename == str(missing)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match=r"loop: cannot be read: Too many levels of symbolic links"):
        read_regular_file(tmp_path / "loop", WHAT, limit_bytes=100)
    for impossible in ("a\0b", "\ud800"):
        with pytest.raises(InvalidInputError, match=r"is no path: .*; give a file with a token"):
            read_regular_file(impossible, WHAT, limit_bytes=100)


def _is_open(path: Path) -> bool:
    """Whether a descriptor of this process leads to the file."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return True
    return False
