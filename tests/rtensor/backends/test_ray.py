"""The backend for Ray, on a cluster that these tests start in a process of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

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


def test_a_batch_goes_through_rays_store(driver: Peer) -> None:
    driver.call(ray_tasks.a_batch_goes_through_rays_store)


def test_names_of_several_owners_are_kept_apart(driver: Peer) -> None:
    driver.call(ray_tasks.names_of_several_owners_are_kept_apart)


def test_actors_consume_and_are_drained(driver: Peer) -> None:
    driver.call(ray_tasks.actors_consume_and_are_drained)


def test_drained_objects_leave_rays_store(driver: Peer) -> None:
    driver.call(ray_tasks.drained_objects_leave_rays_store)


def test_batches_are_cleared_by_name(driver: Peer) -> None:
    driver.call(ray_tasks.batches_are_cleared_by_name)


def test_the_limit_holds_for_rays_store(driver: Peer) -> None:
    driver.call(ray_tasks.the_limit_holds_for_what_is_put)


def test_an_interrupted_store_takes_no_memory(driver: Peer) -> None:
    driver.call(ray_tasks.an_interrupted_store_takes_no_memory)


def test_failures_of_ray_have_the_names_of_the_guide(driver: Peer) -> None:
    driver.call(ray_tasks.failures_of_ray_have_the_names_of_the_guide)


def test_an_infinite_timeout_is_accepted(driver: Peer) -> None:
    driver.call(ray_tasks.who_waits_without_end_says_so)


def test_each_store_looks_at_its_own_shards_alone(driver: Peer) -> None:
    driver.call(ray_tasks.each_store_looks_at_its_own_shards_alone)


def test_names_that_are_reused_after_a_drain_take_no_more_memory(driver: Peer) -> None:
    driver.call(ray_tasks.names_that_were_drained_and_are_given_anew_take_no_more_room)


# The last one: nothing follows in a cluster that was left.
def test_a_process_that_left_the_cluster_starts_no_other_one(driver: Peer) -> None:
    driver.call(ray_tasks.who_left_the_cluster_starts_no_other_one)
