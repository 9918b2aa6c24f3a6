"""`node_shared(path=…)`: an array in a file, published whole and found again by its content."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.recfunctions import repack_fields
from support.distributed.rank_processes import Job, Line, outcome, settle

import tundish as td
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    StorageError,
)
from tundish.shm import node_sharing
from tundish.shm.shared_array import as_numpy


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    settle()


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ino for path in folder.rglob("*.npy")}


def unbuilt() -> np.ndarray:
    raise AssertionError("was built again")


def test_the_same_content_is_found_again(tmp_path: Path) -> None:
    array = np.arange(1000).reshape(10, 100)
    first = td.shm.node_shared(array, path=tmp_path / "a")
    before = files(tmp_path)
    assert len(before) == 1
    (name,) = before
    assert np.array_equal(np.load(tmp_path / name, mmap_mode="r"), array)
    # From a callable, from a copy with other strides.
    second = td.shm.node_shared(lambda: np.repeat(array, 2, axis=0)[::2], path=tmp_path / "a")
    assert np.array_equal(second, first)
    assert files(tmp_path) == before
    for other in (array.astype(np.int32), array.reshape(100, 10), np.asfortranarray(array), array + 1):
        td.shm.node_shared(other, path=tmp_path / "a")
    assert len(files(tmp_path)) == 5
    assert not list(tmp_path.rglob("*incomplete*"))


def test_a_key_stands_for_the_content(tmp_path: Path) -> None:
    assert td.shm.node_shared(lambda: np.arange(5), key="five", path=tmp_path).tolist() == [0, 1, 2, 3, 4]
    before = files(tmp_path)
    assert td.shm.node_shared(unbuilt, key="five", path=tmp_path).tolist() == [0, 1, 2, 3, 4]
    assert td.shm.node_shared(np.zeros(5, int), key="five", path=tmp_path).tolist() == [0, 1, 2, 3, 4]
    assert files(tmp_path) == before
    with pytest.raises(InvalidInputError, match="'five' belongs to an array of dtype int64"):
        td.shm.node_shared(np.zeros(6), key="five", path=tmp_path)
    with pytest.raises(AssertionError, match="built again"):
        td.shm.node_shared(unbuilt, key="six", path=tmp_path)


def test_another_array_that_was_faster_under_the_same_key_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = node_sharing._publish

    def late(array: np.ndarray, layout: Any, target: Path) -> None:
        # As another job would.
        publish(*as_numpy(np.arange(5)), target)
        publish(array, layout, target)

    monkeypatch.setattr(node_sharing, "_publish", late)
    with pytest.raises(
        InvalidInputError, match="'mine' belongs to an array of dtype int64 and shape \\(5,\\)"
    ):
        td.shm.node_shared(np.zeros(6), key="mine", path=tmp_path)
    assert td.shm.node_shared(np.zeros(5, int), key="yours", path=tmp_path).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_c_contiguous", [True, False])
def test_arrays_of_many_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_c_contiguous: bool
) -> None:
    monkeypatch.setattr(node_sharing, "CHUNK_BYTES", 1000)
    array = np.random.default_rng(0).integers(0, 255, (70, 901), np.uint8)
    if not is_c_contiguous:
        array = array[:, ::2]
    assert np.array_equal(td.shm.node_shared(array, path=tmp_path), array)
    # The chunk size and the strides do not change the name.
    before = files(tmp_path)
    td.shm.node_shared(array.copy(), path=tmp_path)
    assert files(tmp_path) == before
    array = array.copy()
    array[69, 450] += 1
    td.shm.node_shared(array, path=tmp_path)
    assert len(files(tmp_path)) == 2


def test_a_map_of_a_file_is_kept_without_its_copy_in_memory(tmp_path: Path) -> None:
    source = np.memmap(tmp_path / "source", np.uint8, "w+", shape=(64 << 20,))
    source[::4096] = 3
    source.flush()
    kept = td.shm.node_shared(np.memmap(tmp_path / "source", np.uint8, "r"), path=tmp_path / "arrays")
    assert np.array_equal(kept[::4096], source[::4096])
    assert isinstance(kept.base, np.memmap)


def headed(descr: str, shape: str, data: int = 40) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\x01" * data


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        # Its bytes would be used as addresses of objects.
        (lambda path: path.write_bytes(headed("'|O'", "(5,)")), "Python objects"),
        (lambda path: path.write_bytes(headed("[('a', '|O')]", "(5,)")), "Python objects"),
        (lambda path: path.write_bytes(headed("'<i8'", "(-1, -5)")), "is damaged"),
        (lambda path: path.write_bytes(headed("'<i8'", "(0, -5)", 0)), "is damaged"),
        (lambda path: path.write_bytes(headed("'<i8'", f"(0, {10**30})", 0)), "is damaged"),
        (lambda path: os.truncate(path, 60), "is damaged"),
        (lambda path: path.write_bytes(b"not numpy's"), "is damaged"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\x05\x00{'de}"), "is damaged"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path, damage: Any, reason: str) -> None:
    td.shm.node_shared(np.arange(5), key="five", path=tmp_path)
    (path,) = tmp_path.rglob("array.npy")
    damage(path)
    with pytest.raises(StorageError, match=reason) as caught:
        td.shm.node_shared(unbuilt, key="five", path=tmp_path)
    assert caught.value.filename == str(path)


def test_places_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="/file cannot be made as a folder"):
        td.shm.node_shared(np.arange(5), path=tmp_path / "file")
    with pytest.raises(
        NotFoundError, match=r"/a/b cannot be made, since .*/a does not exist: make that first$"
    ):
        td.shm.node_shared(np.arange(5), path=tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    td.shm.node_shared(np.arange(5), key="five", path=tmp_path)
    (path,) = tmp_path.rglob("array.npy")
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(AlreadyExistsError):
        td.shm.node_shared(np.arange(5), key="five", path=tmp_path)


def test_arrays_and_paths_that_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match="has Python objects"):
        td.shm.node_shared(np.array([{}, 1]), path=tmp_path / "arrays")
    assert not (tmp_path / "arrays").exists()
    for path in ("", "a\0b", 3, b"bytes"):
        with pytest.raises((InvalidInputError, InvalidTypeError), match="path"):
            td.shm.node_shared(np.arange(3), path=path)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [None, "rows"])
def test_fields_out_of_order_are_refused_with_a_hint(key: str | None, tmp_path: Path) -> None:
    rows = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])[["b", "a"]]
    with pytest.raises(InvalidInputError, match="repack_fields"):
        td.shm.node_shared(rows, path=tmp_path, key=key)
    assert not list(tmp_path.iterdir())
    shared = td.shm.node_shared(repack_fields(rows), path=tmp_path, key=key)
    assert shared["a"].tolist() == [1, 3] and shared["b"].tolist() == [2.5, 4.5]


def test_a_file_that_went_or_was_replaced_is_not_taken_for_it(tmp_path: Path) -> None:
    import pickle

    array = td.shm.node_shared(np.arange(5), path=tmp_path)
    message = pickle.dumps(array)
    assert len(message) < 1024
    (path,) = tmp_path.rglob("array.npy")
    path.rename(path.with_name("kept"))
    with pytest.raises(
        NotFoundError, match=r"\[Errno 2\] /.*/array.npy does not exist, but an array was shared from it: "
    ):
        pickle.loads(message)
    np.save(path, np.arange(5))
    with pytest.raises(
        StorageError,
        match=r"/array.npy was replaced after an array was shared from it: share the array again$",
    ):
        pickle.loads(message)
    # The mapped array stays.
    assert array.tolist() == [0, 1, 2, 3, 4]


def share_in_a_file(rank: int, line: Line) -> None:
    folder = Path(line.hear())
    calls = []

    def build() -> np.ndarray:
        calls.append(rank)
        return np.arange(100_000)

    for key in (None, None, "a key", "a key"):
        array = td.shm.node_shared(build, path=folder, key=key)
        assert array[-1] == 99_999
        assert not array.flags.writeable
    line.say(len(calls), sorted(files(folder).values()))
    line.say(*outcome(lambda: td.shm.node_shared(build, path=folder / f"of rank {rank}")))


def test_ranks_share_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    with Job(share_in_a_file, 3, tmp_path) as job:
        job.tell_all(str(folder))
        heard = job.hear_all()
        assert [calls for calls, _ in heard] == [3, 0, 0]
        assert [len(inodes) for _, inodes in heard] == [2] * 3
        # The builder's path is used.
        assert [kind for kind, _, _ in job.hear_all()] == [""] * 3
        assert not (folder / "of rank 1").exists()
        job.expect_end()
