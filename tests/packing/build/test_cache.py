"""`cache_dir`: plans that lie there, that are damaged, and caches that cannot be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tundish as td
from tundish import _native
from tundish.errors import AlreadyExistsError, InvalidInputError, NotFoundError, PlanFormatError, StorageError

LENGTHS = np.random.default_rng(0).integers(0, 300, 2000)


def cached(folder: Path) -> td.PackPlan:
    return td.pack(LENGTHS, 128, seed=5, cache_dir=folder, progress=False)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """The folder of a plan in the cache `tmp_path`."""
    path = cached(tmp_path).path
    assert path is not None
    return path


def test_a_plan_that_is_there_is_mapped_and_left_as_it_is(plan: Path, tmp_path: Path) -> None:
    before = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in plan.iterdir()}
    again = cached(tmp_path)
    assert again.path == plan and again.has_lengths
    again.verify()
    assert {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in plan.iterdir()} == before


def test_a_plan_stays_readable_when_it_is_removed_after_it_was_mapped(plan: Path, tmp_path: Path) -> None:
    mapped = cached(tmp_path)
    shutil.rmtree(plan)
    mapped.verify()


def test_a_damaged_plan_is_refused_with_what_to_do(plan: Path, tmp_path: Path) -> None:
    file = plan / "longest.npy"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(PlanFormatError) as caught:
        cached(tmp_path)
    assert str(file) in str(caught.value) and f"remove {plan} " in str(caught.value)
    shutil.rmtree(plan)
    cached(tmp_path).verify()


def test_a_plan_that_lacks_a_file_is_refused_with_what_to_do(plan: Path, tmp_path: Path) -> None:
    (plan / "longest.npy").unlink()
    with pytest.raises(NotFoundError, match=f"remove {plan} ") as caught:
        cached(tmp_path)
    assert caught.value.filename == str(plan / "longest.npy")
    (plan / "plan.json").unlink()
    with pytest.raises(AlreadyExistsError, match="remove it") as taken:
        cached(tmp_path)
    assert taken.value.filename == str(plan)
    assert len(list(plan.iterdir())) == 5
    shutil.rmtree(plan)
    cached(tmp_path).verify()


def test_a_damaged_folder_to_write_to_is_refused_with_what_to_do(tmp_path: Path) -> None:
    target = tmp_path / "plan"
    td.pack(LENGTHS, 128, out=target)
    (target / "indices.npy").write_bytes(b"")
    with pytest.raises(PlanFormatError, match=f"remove {target} "):
        td.pack(LENGTHS, 128, out=target)


def test_a_cache_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        cached(tmp_path / "file")
    with pytest.raises(StorageError, match="x" * 300):
        cached(tmp_path / ("x" * 300))
    with pytest.raises(InvalidInputError, match="null"):
        cached(tmp_path / "a\0b")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for destination in ({"cache_dir": "cache"}, {"out": "plan"}):
        with pytest.raises(NotFoundError, match="current folder"):
            td.pack([8], 8, **destination)
    # Calls that do not use it still work.
    cached(tmp_path / "cache").verify()
    td.pack([8], 8, out=tmp_path / "plan").verify()


@pytest.mark.parametrize("changes", ["lengths", "order"])
@pytest.mark.parametrize(
    ("destination", "share"), [("cache_dir", False), ("cache_dir", True), ("out", True), (None, True)]
)
def test_inputs_that_change_once_they_were_hashed_make_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, destination: str | None, share: bool, changes: str
) -> None:
    """It would lie under the fingerprint of another one, in the way of every good call."""
    changed = LENGTHS.copy() if changes == "lengths" else np.arange(len(LENGTHS))
    inputs: dict[str, Any] = {"lengths": LENGTHS, changes: changed}
    where: dict[str, Any] = (
        {}
        if destination is None
        else {destination: tmp_path if destination == "cache_dir" else tmp_path / "plan"}
    )
    hashing = _native.plan_fingerprint

    def fingerprint(request: _native.PackRequest, progress: Callable[[str, int, int], None] | None) -> str:
        found = hashing(request, progress)
        changed[[0, 1]] = changed[[1, 0]]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(_native, "plan_fingerprint", fingerprint)
        with pytest.raises(InvalidInputError, match="changed while"):
            td.pack(**inputs, max_length=128, share=share, progress=False, **where)
    assert os.listdir(tmp_path) == []
    plan = td.pack(**inputs, max_length=128, share=share, progress=False, **where)
    plan.verify(order=inputs.get("order"))
