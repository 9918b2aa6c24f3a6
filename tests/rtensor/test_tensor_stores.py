"""Several stores in one process: each has its own shards, fetch buffer, limits, server, backend and steps."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tundish import rtensor
from tundish.errors import InvalidInputError, ShardGoneError, TensorStoreFullError, TransferError
from tundish.rtensor import Controller, HttpBackend, LocalBackend, TensorStore, Worker


@pytest.fixture
def stores() -> Iterator[tuple[TensorStore, TensorStore]]:
    with TensorStore() as one, TensorStore() as two:
        yield one, two


@pytest.mark.parametrize("shared_memory", [True, False])
def test_two_stores_serve_side_by_side(
    stores: tuple[TensorStore, TensorStore], *, shared_memory: bool
) -> None:
    one, two = stores
    for store in stores:
        store.set_backend(HttpBackend(shared_memory=shared_memory))
    addresses = {one.serve().addr, two.serve().addr, rtensor.serve().addr}
    assert len(addresses) == 3
    ones, twos = one.remotize([torch.ones(4), torch.ones(5)]), two.remotize(torch.full((6,), 2.0))
    assert [one.storage_stats()["num_tensors"], two.storage_stats()["num_tensors"]] == [2, 1]
    assert one.localize(twos).tolist() == [2.0] * 6
    assert [tensor.tolist() for tensor in two.localize(ones)] == [[1.0] * 4, [1.0] * 5]
    entries = [store.fetch_buffer_stats()["num_entries"] for store in stores]
    assert entries == [1, 2]
    assert rtensor.storage_stats()["num_tensors"] == rtensor.fetch_buffer_stats()["num_entries"] == 0
    found = rtensor.process_stats(addresses)
    assert sorted(stats["storage"]["num_entries"] for stats in found.values()) == [0, 1, 2]  # type: ignore[index]


def test_equal_names_in_two_stores_are_two_shards(stores: tuple[TensorStore, TensorStore]) -> None:
    one, two = stores
    handles = [one.store("rewards", torch.ones(2)), two.store("rewards", torch.zeros(2))]
    assert [tensor.tolist() for tensor in rtensor.localize(handles)] == [[1.0, 1.0], [0.0, 0.0]]
    assert one.remove("rewards") == 1
    assert two.fetch("rewards").tolist() == [0.0, 0.0]


def test_a_step_drains_its_own_store_alone(stores: tuple[TensorStore, TensorStore]) -> None:
    one, two = stores
    handle = one.remotize(torch.ones(3))
    with one.step(claim=handle), two.step():
        for store in (one, two, rtensor):
            store.localize(handle)
        assert two.fetch_buffer_stats()["num_entries"] == 1
    assert [store.fetch_buffer_stats()["num_entries"] for store in (two, rtensor)] == [0, 1]
    assert one.storage_stats()["num_tensors"] == 0


def test_a_controller_drains_the_stores_that_it_is_given(stores: tuple[TensorStore, TensorStore]) -> None:
    one, two = stores
    handle = one.remotize(torch.ones(3))
    with Controller([Worker(one.address())], store=two) as controller, controller.step(claim=handle):
        two.localize(handle)
        rtensor.localize(handle)
    assert one.storage_stats()["num_tensors"] == two.fetch_buffer_stats()["num_entries"] == 0
    assert rtensor.fetch_buffer_stats()["num_entries"] == 1


def test_each_store_has_its_own_limit(stores: tuple[TensorStore, TensorStore]) -> None:
    one, two = stores
    one.serve(limit_bytes=1 << 20)
    with pytest.raises(TensorStoreFullError):
        one.remotize(torch.zeros(2 << 20, dtype=torch.uint8))
    assert two.localize(two.remotize(torch.zeros(2 << 20, dtype=torch.uint8))).numel() == 2 << 20


def test_a_closed_store_serves_no_more_and_the_other_goes_on(
    stores: tuple[TensorStore, TensorStore],
) -> None:
    one, two = stores
    ones, twos = one.remotize(torch.ones(2)), two.remotize(torch.ones(2))
    fetched = two.localize(ones)
    one.close()
    one.close()
    assert fetched.tolist() == [1.0, 1.0]
    with pytest.raises(TransferError):
        rtensor.localize(ones)
    assert rtensor.localize(twos).tolist() == [1.0, 1.0]


def test_a_backend_works_for_one_store(stores: tuple[TensorStore, TensorStore]) -> None:
    backend = HttpBackend()
    stores[0].set_backend(backend)
    with pytest.raises(InvalidInputError, match="make one for each store"):
        stores[1].set_backend(backend)


def found_in_child(stores: tuple[TensorStore, ...], handle: Any, pipe: Any) -> None:
    """Sends what a child finds in the stores that it inherited, and what they do in it."""
    before = [store.storage_stats()["num_tensors"] for store in stores]
    addresses = [store.address() for store in stores]
    fetched = stores[1].localize(handle).tolist()
    pipe.send((before, addresses, fetched, stores[0].localize(stores[0].remotize(torch.ones(1))).tolist()))


def test_a_forked_child_begins_with_empty_stores(stores: tuple[TensorStore, TensorStore]) -> None:
    one, two = stores
    handle = one.remotize(torch.ones(2))
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    child = context.Process(target=found_in_child, args=((one, two), handle, its))
    child.start()
    its.close()
    before, addresses, fetched, own = mine.recv()
    child.join()
    assert (before, fetched, own) == ([0, 0], [1.0, 1.0], [1.0])
    assert not {one.address(), two.address()} & set(addresses)
    assert one.fetch(handle.shard_id).tolist() == [1.0, 1.0]
    one.remove(handle.shard_id)
    with pytest.raises(ShardGoneError):
        one.fetch(handle.shard_id)


def test_stores_controllers_and_backends_say_what_they_are() -> None:
    with TensorStore() as store, Controller([], store=store) as controller:
        assert repr(store) == "<TensorStore not serving, 0 stored tensors, HttpBackend(shared_memory=True)>"
        store.set_backend(LocalBackend())
        batch = store.remotize(torch.ones(2))
        assert repr(store) == "<TensorStore not serving, 1 stored tensor, LocalBackend()>"
        store.remove(batch.shard_id)
        server = store.serve()
        assert repr(store) == f"<TensorStore at {server.addr}, 0 stored tensors, LocalBackend()>"
        controller.update([Worker(server.addr)])
        with controller.step(number=120):
            assert repr(controller) == "<Controller of 1 worker, in step 120>"
    assert repr(controller) == "<Controller of 1 worker, closed (it was closed)>"


def test_the_start_of_a_server_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tundish.rtensor"), TensorStore() as store:
        server = store.serve(token="s3cret")
        store.serve(token="s3cret")
        assert caplog.messages == [f"serving tensors at {server.addr} without TLS, to clients with the token"]
