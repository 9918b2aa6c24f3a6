"""What the tests of faults of shared memory share. Each leaves its process as it found it: see `leftovers.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "shm"))
sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))

import rank_processes
from leftovers import watched
from private_shm import folder as folder


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    # What a test's first job starts stays.
    rank_processes.settle()
    with watched():
        yield
