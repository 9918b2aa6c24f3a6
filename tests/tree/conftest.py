"""One other process for all tests of trees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.tree.elsewhere import Elsewhere


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[Elsewhere]:
    process = Elsewhere()
    yield process
    process.close()
