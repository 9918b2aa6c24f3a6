"""One other process for all tests of trees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.tree.echo_process import EchoProcess


@pytest.fixture(scope="session")
def echo() -> Iterator[EchoProcess]:
    process = EchoProcess()
    yield process
    process.close()
