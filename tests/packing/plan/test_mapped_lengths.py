"""Lengths in mapped files that are truncated, replaced, moved or taken away."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tundish as td
from tundish.errors import NotFoundError, StorageError

LENGTHS = np.random.default_rng(0).integers(1, 300, 50_000)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    return tmp_path / "lengths.npy"


def test_a_truncated_file_is_refused_by_name_before_it_is_read(file: Path) -> None:
    """In a process of its own, which reading the file would end."""
    code = """
import os, sys, numpy as np, tundish as td
file = sys.argv[1]
mapped = np.load(file, mmap_mode="r")
plan = td.pack(mapped, 128)
given = td.pack(np.arange(50_000), 128, order=np.arange(50_000))
size = os.path.getsize(file)
os.truncate(file, size - 8)
whole = {"lengths": mapped, "view": mapped[:], "end": mapped[40_000:], "reversed": mapped[::-1],
         "plain": np.asarray(mapped), "strided": mapped[1::2], "other width": mapped.view(np.int32)}
for name, lengths in whole.items():
    for call in (
        lambda: td.pack(lengths, 128),
        lambda: td.pack_datasets([[5], lengths], 128),
        lambda: td.pack(np.zeros(50_000, dtype=int), 128, order=lengths),
        lambda: plan.verify(lengths),
        lambda: plan.verify(),
        lambda: given.verify(order=lengths),
    ):
        try:
            call()
        except td.errors.StorageError as error:
            assert error.filename == file and "truncated" in str(error), error
        else:
            raise SystemExit(f"{name} was read")
# The rest of the file can be used.
os.truncate(file, size - 8 * 1000)
for lengths in (mapped[:49_000], mapped[48_999::-1], mapped[:49_000:7]):
    td.pack(lengths, 128).verify()
"""
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_file_that_was_replaced_is_still_read_where_it_is_mapped(file: Path, tmp_path: Path) -> None:
    mapped = np.load(file, mmap_mode="r")
    expected = td.pack(LENGTHS, 128).fingerprint
    np.save(tmp_path / "short.npy", LENGTHS[:5])
    (tmp_path / "short.npy").replace(file)
    assert td.pack(mapped, 128).fingerprint == expected
    file.unlink()
    assert td.pack(mapped, 128).fingerprint == expected


def test_a_worker_that_cannot_map_the_lengths_again_names_the_file(file: Path) -> None:
    pickled = pickle.dumps(td.pack(np.load(file, mmap_mode="r"), 128))
    os.truncate(file, 1000)
    with pytest.raises(StorageError, match="truncated") as caught:
        pickle.loads(pickled)
    assert caught.value.filename == str(file)
    file.unlink()
    with pytest.raises(NotFoundError, match="lengths") as missing:
        pickle.loads(pickled)
    assert missing.value.filename == str(file)
    file.mkdir()
    with pytest.raises(StorageError, match="cannot be mapped") as refused:
        pickle.loads(pickled)
    assert (refused.value.filename, refused.value.errno) == (str(file), errno.EISDIR)


def test_an_empty_map_travels(tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", LENGTHS[:0])
    plan = td.pack(np.load(tmp_path / "none.npy", mmap_mode="r"), 128)
    pickle.loads(pickle.dumps(plan)).verify()
