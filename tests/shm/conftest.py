"""Every test of shared memory leaves its process as it found it: see `leftovers.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.shm.leftovers import watched


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with watched():
        yield
