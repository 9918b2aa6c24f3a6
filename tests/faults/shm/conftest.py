"""Fixtures of the fault tests of shared memory. Each test leaves nothing in its process: see `leftovers.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.distributed import rank_processes
from support.shm.leftovers import watched
from support.shm.private_shm import folder as folder


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    # Helpers that a test's first job starts stay.
    rank_processes.settle()
    with watched():
        yield
