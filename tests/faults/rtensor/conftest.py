"""Fixtures of the fault tests of rtensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Later tests of shared memory in this process count segments."""
    yield
    import tundish as td

    td.rtensor.clear_node()
