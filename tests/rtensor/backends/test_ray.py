"""The backend for Ray, on a cluster that these tests start in a process of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import pytest
from support.rtensor import ray_tasks
from support.rtensor.peers import Peer


@pytest.fixture(scope="module")
def driver() -> Iterator[Peer]:
    # Short, for the names of its sockets; what its processes still write while they end is no matter.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder, Peer() as peer:
        peer.call(ray_tasks.begin, folder)
        yield peer
        peer.call(ray_tasks.end)


@pytest.fixture(autouse=True)
def backend(driver: Peer) -> Iterator[None]:
    driver.call(ray_tasks.begin_test)
    yield
    driver.call(ray_tasks.end_test)


# The last one leaves the cluster.
@pytest.mark.parametrize("task", ray_tasks.TASKS, ids=lambda task: task.__name__)
def test_rays_store(driver: Peer, task: Callable[[], None]) -> None:
    driver.call(task)
