"""Another user of the node cannot change a published plan, nor put one in place of the plan that a cache lacks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.other_user import as_nobody

import tundish as td

LENGTHS = np.arange(1, 200)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user may read."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_another_user_reads_a_published_plan_and_changes_nothing(shared_folder: Path) -> None:
    folder = shared_folder / "plan"
    published = td.pack(LENGTHS, 64, out=folder, progress=False)

    def attack() -> None:
        assert td.PackPlan.load(folder, progress=False).fingerprint == published.fingerprint
        for path in (folder, *folder.iterdir()):
            assert not os.access(path, os.W_OK), path
        with pytest.raises(PermissionError):
            (folder / "plan.json").unlink()
        with pytest.raises(PermissionError):
            folder.rename(shared_folder / "elsewhere")
        with pytest.raises(td.errors.StorageError, match="Permission denied"):
            td.pack(LENGTHS, 32, out=shared_folder / "another", progress=False)

    as_nobody(attack)
    assert td.pack(LENGTHS, 64, out=folder, progress=False).fingerprint == published.fingerprint


def test_files_that_another_user_left_in_a_shared_cache_are_an_error(shared_folder: Path) -> None:
    cache = shared_folder / "cache"
    name = td.pack(LENGTHS, 64, cache_dir=shared_folder / "own", progress=False).fingerprint
    cache.mkdir()
    cache.chmod(0o1777)

    def attack() -> None:
        (cache / f"plan-{name}").mkdir()
        (cache / f"plan-{name}" / "plan.json").write_text("{}")

    as_nobody(attack)
    with pytest.raises(td.errors.PlanFormatError, match="remove"):
        td.pack(LENGTHS, 64, cache_dir=cache, progress=False)
