"""The connections to the job's store: how many a process has, and what becomes of one that breaks."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tundish.distributed.jobstore import JobStore


@pytest.fixture
def base() -> Any:
    from torch import distributed

    server = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return distributed.PrefixStore("default_pg", server)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_all_who_use_a_store_share_one_connection(base: Any) -> None:
    first = JobStore(base, "first")
    first.connect()
    before = descriptors()
    others = [JobStore(base, f"other {number}") for number in range(4)]
    for number, other in enumerate(others):
        other.connect()
        other.write("key", str(number))
    assert descriptors() == before
    # Each has its own keys, also when the one that connected is closed.
    first.close()
    assert [other.read("key") for other in others] == ["0", "1", "2", "3"]
    for other in others:
        other.close()
    assert descriptors() < before


def test_a_connection_that_breaks_is_nobodys_who_comes_after(base: Any) -> None:
    class Broken:
        def set(self, *_: str) -> None:
            raise ConnectionError("reset by peer")

    first = JobStore(base, "first")
    first.connect()
    first._connection = Broken()
    with pytest.raises(ConnectionError):
        first.write("key", "value")
    second = JobStore(base, "second")
    second.connect()
    assert second._shared is not first._shared
    second.write("key", "value")
    assert second.read("key") == "value"
