"""A process that runs out of descriptors is told so: no checkpoint is called damaged or passed over for that."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.distributed.rank_processes import Job, Line, outcome

from tundish.checkpoint import Checkpointer, open_readonly, verify
from tundish.distributed import vote
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
        # What is imported later, is imported now.
        checkpointer.load_dcp({"w": torch.ones(9)})
    return root


def test_a_root_is_opened_with_all_that_is_there_or_not_at_all(root: Path) -> None:
    registry = (root / "checkpoints.json").read_bytes()
    opened = []
    for free in range(40):
        with (
            contextlib.suppress(OSError),
            only(free),
            Checkpointer(root, on_failure="raise") as checkpointer,
        ):
            opened.append(checkpointer.latest("dcp"))
        assert os.readlink(root / "dcp-latest") == "dcp-2"
        assert (root / "checkpoints.json").read_bytes() == registry
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


def opens_with_few(rank: int, line: Line) -> None:
    root = line.hear()
    vote(what="whatever everybody has for votes")
    began = time.monotonic()
    # Those of a voter, and fewer than the groups take.
    with only(4) if rank == 1 else contextlib.nullcontext():
        line.say(*outcome(lambda: Checkpointer(root, timeout=40)), time.monotonic() - began < 10)
    with Checkpointer(root, timeout=40):
        pass


def test_a_rank_that_has_too_few_for_the_groups_says_so_and_nobody_waits_for_it(tmp_path: Path) -> None:
    with Job(opens_with_few, 2, tmp_path) as job:
        for rank in range(2):
            job.tell(rank, str(tmp_path / "root"))
        (first, told, who, is_soon), (second, text, _, is_soon_too) = job.hear_all()
        assert (first, who, second) == ("PeerFailedError", 1, "StorageError")
        assert "2 ranks take 3 descriptors of each process" in text
        assert "ulimit -n" in text
        assert "ulimit -n" in told
        assert is_soon
        assert is_soon_too
        job.expect_end()
