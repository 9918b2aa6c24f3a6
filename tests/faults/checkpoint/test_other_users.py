"""Another user of the node cannot change a root and cannot hold up its owner."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.checkpoint.checkpoint_roots import Root, manifest
from support.other_user import as_nobody

from tundish._native import AtomicFolder
from tundish.checkpoint import Checkpointer, open_readonly


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user may read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def save(root: Path, step: int) -> Path:
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        checkpointer.save_dcp(step, {"w": torch.ones(1000)}, blocking=True)
        return checkpointer.save_hf(step, {"w": torch.ones(1000)}).result(60)


def test_another_user_changes_nothing(shared_folder: Path) -> None:
    root = shared_folder / "root"
    published = save(root, 1)

    def attack() -> None:
        for path in (root, published, *published.iterdir()):
            assert not os.access(path, os.W_OK), path
        with pytest.raises(PermissionError):
            (root / "hf-2").mkdir()
        with pytest.raises(PermissionError):
            (root / "hf-latest").unlink()
        with pytest.raises(OSError, match="Permission denied"):
            Checkpointer(root, on_failure="raise", timeout=10)

    as_nobody(attack)
    assert open_readonly(root).latest("hf") == published
    open_readonly(root).verify(published)


def test_another_user_cannot_take_the_writer_lock(shared_folder: Path) -> None:
    root = shared_folder / "root"
    save(root, 1)

    def attack() -> None:
        for mode in ("rb", "r+b"):
            with pytest.raises(PermissionError):
                (root / ".owner").open(mode)

    as_nobody(attack)
    save(root, 2)


def test_another_user_cannot_lock_a_folder_that_is_being_written(shared_folder: Path) -> None:
    root = Root(shared_folder / "root", wait_seconds=0)
    unfinished = root.begin("hf", 1, overwrite=False)
    plan = AtomicFolder(shared_folder / "plan")
    plan.append("file", b"bytes")
    (unfinished_plan,) = shared_folder.glob(".plan.*")

    def attack() -> None:
        for folder in (unfinished, unfinished_plan):
            with pytest.raises(PermissionError):
                os.open(folder, os.O_RDONLY)

    as_nobody(attack)
    plan.publish()
    (unfinished / "weights").write_bytes(b"9")
    published = root.publish("hf", 1, manifest("hf", 1, {"weights": 1}), overwrite=False)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (published, shared_folder / "plan")] == [
        0o755
    ] * 2
    root.close()


def test_another_user_may_read_where_the_umask_lets_it(shared_folder: Path) -> None:
    published = save(shared_folder / "root", 1)

    def read() -> None:
        view = open_readonly(shared_folder / "root")
        assert view.latest("hf") == published
        view.verify(published)

    as_nobody(read)
    before = os.umask(0o077)
    try:
        save(shared_folder / "private", 1)
    finally:
        os.umask(before)

    def refused() -> None:
        with pytest.raises(OSError, match="Permission denied"):
            open_readonly(shared_folder / "private").list()

    as_nobody(refused)
