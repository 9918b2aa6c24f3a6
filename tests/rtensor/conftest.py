"""What tests of remote tensors run under: a store that is empty before and after each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def local() -> Iterator[None]:
    """The backend of one process, with nothing in it."""
    import tundish as td

    td.rtensor.set_backend(td.rtensor.LocalBackend())
    td.rtensor.clear_node()
    yield
    td.rtensor.clear_node()
    td.rtensor.set_backend(None)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Tests of shared memory, which may be the next ones of this process, count its segments."""
    yield
    import tundish as td

    td.rtensor.clear_node()
