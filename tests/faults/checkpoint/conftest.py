"""Fixtures of the fault tests."""

from __future__ import annotations

import pytest
from support.checkpoint.interrupted_root import InterruptedRoot


@pytest.fixture(scope="session")
def interrupted_root(tmp_path_factory: pytest.TempPathFactory) -> InterruptedRoot:
    return InterruptedRoot(tmp_path_factory.mktemp("interrupted"))
