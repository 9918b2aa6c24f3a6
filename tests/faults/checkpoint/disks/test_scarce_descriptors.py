"""A lack of descriptors is reported as such: no checkpoint counts as damaged for it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tundish.checkpoint import Checkpointer, open_readonly, verify
from tundish.errors import StorageError


@contextlib.contextmanager
def only(free: int) -> Iterator[None]:
    """So many descriptors are left to this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not so many above the lowest one, which may be a gap below hundreds that are taken.
    first_beyond = next(itertools.islice(filter(_is_unused, itertools.count()), free, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_beyond, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _is_unused(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    with Checkpointer(root, on_failure="raise") as checkpointer:
        for step in (1, 2):
            checkpointer.save_dcp(step, {"w": torch.full((9,), float(step))}, blocking=True)
        # Later imports happen now.
        checkpointer.load_dcp({"w": torch.ones(9)})
    return root


def test_a_root_is_opened_with_all_that_is_there_or_not_at_all(root: Path) -> None:
    opened = []
    for free in range(40):
        with (
            contextlib.suppress(OSError),
            only(free),
            Checkpointer(root, on_failure="raise") as checkpointer,
        ):
            opened.append(checkpointer.latest("dcp"))
        assert os.readlink(root / "dcp-latest") == "dcp-2"
    assert opened
    assert set(opened) == {root / "dcp-2"}


def test_nothing_is_called_damaged_that_could_not_be_opened(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    readonly = open_readonly(root)
    latest, verified, loaded = [], 0, []
    with Checkpointer(root, on_failure="raise") as checkpointer, caplog.at_level(logging.WARNING):
        for free in range(40):
            state = {"w": torch.zeros(9)}
            with contextlib.suppress(StorageError), only(free):
                latest.append(readonly.latest("dcp"))
            with contextlib.suppress(StorageError), only(free):
                verified += verify(root / "dcp-2") == []
            with contextlib.suppress(OSError), only(free):
                checkpointer.load_dcp(state)
                loaded.append(state["w"][0].item())
    assert caplog.messages == []
    assert set(latest) == {root / "dcp-2"}
    assert verified
    assert set(loaded) == {2.0}
