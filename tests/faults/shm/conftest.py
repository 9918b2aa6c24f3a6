"""What the tests of faults of shared memory share. Each leaves its process as it found it: see `leftovers.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.distributed import rank_processes
from support.shm.leftovers import watched
from support.shm.private_shm import folder as folder


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    # What a test's first job starts stays.
    rank_processes.settle()
    with watched():
        yield
