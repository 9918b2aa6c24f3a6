"""Named arrays: processes attach by name while a process has the array, and never see a half-written one."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.shm.private_shm import folder as folder

import tundish as td
from tundish.errors import AlreadyExistsError, InvalidInputError, InvalidTypeError, NotFoundError
from tundish.shm import SharedArray


def path_of(folder: Path, name: str) -> Path:
    return folder / f"tundish-{os.geteuid()}-{name}"


def test_a_name_leads_to_the_array_in_every_process(folder: Path) -> None:
    with SharedArray.from_array(np.arange(12).reshape(3, 4), name="tokens") as shared:
        assert (shared.name, shared.array.flags.writeable) == ("tokens", False)
        code = (
            "from tundish.shm import SharedArray; read = SharedArray.attach('tokens');"
            "print(read.array.tolist(), read.array.flags.writeable, read.name)"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout == f"{np.arange(12).reshape(3, 4).tolist()} False tokens\n"
        assert stat.S_IMODE(path_of(folder, "tokens").stat().st_mode) == 0o600


def test_shapes_dtypes_and_orders_are_kept(folder: Path) -> None:
    arrays = [
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array(7, np.int8),
        np.zeros((0, 5), np.float32),
        np.array([(1, 2.0)], dtype=[("id", "<i4"), ("weight", "<f8")]),
        np.arange(100)[::3],
        np.arange(60).reshape(3, 4, 5).transpose(1, 0, 2),
    ]
    for array in arrays:
        with SharedArray.from_array(array, name="any"), SharedArray.attach("any") as read:
            np.testing.assert_array_equal(read.array, array)
            assert read.array.dtype == array.dtype
            assert read.array.flags.f_contiguous == np.array(array, order="K").flags.f_contiguous
            assert read.array.ctypes.data % 64 == 0


def test_tensors(folder: Path) -> None:
    with SharedArray.from_array(torch.ones(5, dtype=torch.bfloat16), name="halves"):
        read = SharedArray.attach("halves")
        tensor = read.tensor()
        tensor[0] = 3
        assert tensor.tolist() == [3, 1, 1, 1, 1]
        assert read.tensor().tolist() == [1, 1, 1, 1, 1], "what is written stays with the writer"
        read.close()
    assert path_of(folder, "halves").exists(), "the tensor has it"
    assert tensor.tolist() == [3, 1, 1, 1, 1]
    del tensor
    assert not path_of(folder, "halves").exists()


def test_readers_see_the_writes_of_the_owner(folder: Path) -> None:
    shared = SharedArray.create((2, 3), np.int32, name="counts", order="F")
    with shared, SharedArray.attach("counts") as read:
        shared.array[1, 2] = 5
        assert read.array[1, 2] == 5
        with pytest.raises(ValueError, match="read-only"):
            read.array[0, 0] = 1


def test_the_name_is_there_as_long_as_anything_of_it(folder: Path) -> None:
    shared = SharedArray.from_array(np.arange(1000), name="tokens")
    view = shared.array[10:20]
    shared.close()
    del shared
    assert path_of(folder, "tokens").exists()
    again = SharedArray.attach("tokens")
    np.testing.assert_array_equal(again.array[10:20], view)
    del view
    assert path_of(folder, "tokens").exists()
    again.close()
    assert not path_of(folder, "tokens").exists()


def test_arrays_with_a_name_are_counted_as_mapped(folder: Path) -> None:
    before = td.shm.stats()["mapped_bytes"]
    shared = SharedArray.create(1 << 20, np.uint8, name="tokens")
    peak = td.shm.stats()["peak_bytes"]
    assert td.shm.stats()["mapped_bytes"] - before == (1 << 20) + 4096
    assert peak >= (1 << 20) + 4096
    # The owner has mapped it twice, and it takes its memory once.
    view = shared.array
    assert td.shm.stats()["mapped_bytes"] - before == (1 << 20) + 4096
    child = os.fork()
    if child == 0:
        shared.close()
        os._exit(0 if td.shm.stats()["mapped_bytes"] == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    shared.close()
    del view, shared
    assert td.shm.stats()["mapped_bytes"] == before


def test_a_writable_view_outlives_its_owner(folder: Path) -> None:
    shared = SharedArray.create(1000, np.int64, name="tokens")
    view, reader = shared.array, SharedArray.attach("tokens")
    shared.close()
    view[3] = 4
    assert reader.array[3] == 4
    reader.close()
    assert path_of(folder, "tokens").exists()
    del view
    assert not path_of(folder, "tokens").exists()


def test_attaching_twice_maps_once(folder: Path) -> None:
    with SharedArray.from_array(np.arange(1000), name="tokens") as shared:
        first, second = SharedArray.attach("tokens"), SharedArray.attach("tokens")
        assert first.array.ctypes.data == second.array.ctypes.data == shared.array.ctypes.data
        first.close()
        second.close()


def test_a_handle_leads_by_the_name_too(folder: Path) -> None:
    with SharedArray.from_array(np.arange(1000), name="tokens") as shared:
        handle = pickle.dumps(shared.handle)
        assert len(handle) < 300
        code = (
            "import pickle, sys; from tundish.shm import SharedArray;"
            "read = SharedArray.attach(pickle.load(sys.stdin.buffer)); print(int(read.array.sum()), read.name)"
        )
        ran = subprocess.run([sys.executable, "-c", code], input=handle, capture_output=True, check=True)
        assert ran.stdout == b"499500 tokens\n"
    # Another segment of this name is not attached to.
    other = SharedArray.from_array(np.zeros(1000), name="tokens")
    with other, pytest.raises(td.errors.SegmentGoneError, match="another segment has taken its place"):
        SharedArray.attach(pickle.loads(handle))


def test_a_name_that_is_taken_is_refused_until_it_is_free(folder: Path) -> None:
    with SharedArray.create(10, np.int8, name="tokens") as shared:
        shared.array[:] = 1
        for make in (
            lambda: SharedArray.create(10, np.int8, name="tokens"),
            lambda: SharedArray.from_array(np.zeros(10), name="tokens"),
        ):
            with pytest.raises(AlreadyExistsError, match=f"held by process {os.getpid()}") as taken:
                make()
            assert taken.value.filename == str(path_of(folder, "tokens"))
    with SharedArray.create(20, np.int8, name="tokens"), SharedArray.attach("tokens") as read:
        assert read.array.tolist() == [0] * 20


def test_a_name_appears_when_its_array_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tundish.shm import shared_array as array

    seen = []
    copy = array._copy

    def watched_copy(*arguments: object) -> None:
        seen.append(list(folder.iterdir()))
        with pytest.raises(NotFoundError):
            SharedArray.attach("tokens")
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(array, "_copy", watched_copy)
    with SharedArray.from_array(np.arange(100)[::2], name="tokens"):
        assert seen == [[]]
        with SharedArray.attach("tokens") as read:
            assert read.array.tolist() == list(range(0, 100, 2))


def test_names_that_cannot_be_used(folder: Path) -> None:
    for name in ("", "a/b", "../a", "ä", "a b", "a" * 201, "\ud800"):
        with pytest.raises(InvalidInputError, match="cannot name a segment"):
            SharedArray.create(1, np.int8, name=name)
        with pytest.raises(InvalidInputError, match="cannot name a segment"):
            SharedArray.attach(name)
    with pytest.raises(InvalidTypeError, match="give a str"):
        SharedArray.create(1, np.int8, name=5)  # type: ignore[arg-type]
    with pytest.raises(
        NotFoundError, match=r"there is no segment .*: make an array with the name"
    ) as missing:
        SharedArray.attach("nothing")
    assert missing.value.filename == str(path_of(folder, "nothing"))
