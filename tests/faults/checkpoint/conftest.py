"""Fixtures of the fault tests."""

from __future__ import annotations

import pytest
from support.checkpoint.disorder import Disorder


@pytest.fixture(scope="session")
def disorder(tmp_path_factory: pytest.TempPathFactory) -> Disorder:
    return Disorder(tmp_path_factory.mktemp("disorder"))
