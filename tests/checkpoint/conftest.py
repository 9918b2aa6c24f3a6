"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoint.checkpoint_roots import Root
from support.checkpoint.dcp_states import new_planner

from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.errors import NotFoundError


@pytest.fixture
def planner() -> SavePlanner:
    return new_planner()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    # Only the root itself is made.
    with pytest.raises(NotFoundError, match=r"run does not exist"):
        Root(tmp_path / "run" / "checkpoints", wait_seconds=0)
    (tmp_path / "run").mkdir()
    opened = Root(tmp_path / "run" / "checkpoints", wait_seconds=0)
    yield opened
    opened.close()
