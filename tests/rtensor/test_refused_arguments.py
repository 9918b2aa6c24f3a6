"""Arguments that cannot be used are refused by name, before anything is done."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.rtensor.peers import Peer

import tundish as td
from tundish import rtensor
from tundish.errors import InvalidInputError, InvalidTypeError, StorageError, TundishError
from tundish.rtensor import Controller, Worker, localize, remotize
from tundish.rtensor.tensor_store import default_store

WORKER = Worker("127.0.0.1:9")
NAN = float("nan")


@pytest.fixture(autouse=True)
def served() -> None:
    td.rtensor.serve()


@pytest.mark.parametrize("timeout", ["1", None, 0, -1, NAN, True])
def test_a_controller_takes_seconds(timeout: Any) -> None:
    with pytest.raises(TundishError, match=r"timeout is .*seconds"):
        Controller([WORKER], timeout=timeout)


def test_a_controller_takes_workers() -> None:
    for worker in ("127.0.0.1:1", 3, (), None):
        with pytest.raises(InvalidTypeError, match="is not a worker"):
            Controller([worker])  # type: ignore[list-item]
    with pytest.raises(InvalidTypeError, match="workers is None"):
        Controller(None)  # type: ignore[arg-type]


def test_a_controller_without_workers_drains_its_own_process() -> None:
    batch = remotize({"a": torch.ones(1)})
    with Controller([], timeout=1e300) as controller, controller.step(claim=batch):
        assert localize(batch)["a"].tolist() == [1]
    assert td.rtensor.storage_stats()["num_tensors"] == 0


def test_tensors_without_handles_are_refused_in_place_of_handles() -> None:
    forgotten = {"a": torch.ones(1), "task": "sums"}
    with Controller([]) as controller:
        calls: list[Callable[[], Any]] = [
            lambda: td.rtensor.step(claim=forgotten).__enter__(),
            lambda: td.rtensor.keep(forgotten),
            lambda: td.rtensor.drain(claim=iter([forgotten])),
            lambda: controller.step(claim=torch.ones(1)).__enter__(),
            lambda: controller.keep([torch.ones(1)]),
        ]
        for call in calls:
            with pytest.raises(
                InvalidInputError, match="has tensors and no handles: give what remotize returned"
            ):
                call()
        ids = td.rtensor.flatten_shard_ids(remotize(torch.ones(1)))
        for call in (lambda: td.rtensor.step(claim=ids).__enter__(), lambda: controller.keep(set(ids))):
            with pytest.raises(
                InvalidInputError, match="has strings and no handles: give what remotize returned"
            ):
                call()
        for nothing in (None, [], {"task": "sums"}):
            with td.rtensor.step(claim=nothing), controller.step(claim=nothing):
                pass


def test_a_closed_controller_is_refused() -> None:
    controller = Controller([Worker(td.rtensor.serve().addr)])
    controller.close()
    calls: list[Callable[[], Any]] = [
        lambda: controller.step().__enter__(),
        lambda: controller.clear_batches(remotize(torch.ones(1))),
        lambda: controller.keep([]),
        controller.stats,
        lambda: controller.update([]),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="controller is closed"):
            call()
    controller.close()


def test_a_handle_is_made_of_a_shard_and_a_tensor() -> None:
    data = torch.empty(3, device="meta")
    for shard in (("name", "a:1"), None, rtensor.TensorShardInfo(b"name", "a:1")):  # type: ignore[arg-type]
        with pytest.raises(InvalidTypeError, match="has to be a TensorShardInfo"):
            rtensor.RTensor(shard, data)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="data is a int, and has to be a tensor"):
        rtensor.RTensor(rtensor.TensorShardInfo("name", "a:1"), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda name: rtensor.store(name, torch.ones(1)),
        rtensor.fetch,
        rtensor.remove,
        lambda name: rtensor.remove(["a", name]),
        lambda name: rtensor.clear_fetch_buffer([name]),
        lambda name: rtensor.RTensor(rtensor.TensorShardInfo(name, "a:1"), torch.empty(1, device="meta")),
    ],
)
@pytest.mark.parametrize("name", ["a\ud800", "a/b", "\udfff", ""])
def test_an_invalid_name_is_refused_with_the_rule_for_names(call: Callable[[str], Any], name: str) -> None:
    with pytest.raises(
        InvalidInputError, match=r"a shard id (is made of A-Z, a-z, 0-9|has 1 to 128 characters)"
    ):
        call(name)


def test_views_sets_and_iterators_of_handles_are_claimed() -> None:
    with Controller([Worker(td.rtensor.serve().addr)]) as controller:
        for wrap in (set, frozenset, iter, lambda handles: dict(enumerate(handles)).values()):
            handles = [remotize(torch.ones(1)), remotize(torch.ones(2))]
            assert controller.clear_batches(wrap(handles)).shards == 2


def test_a_mapping_of_handles_is_no_list_of_names() -> None:
    batch = {"a": remotize(torch.ones(1))}
    for call in (td.rtensor.remove, td.rtensor.clear_fetch_buffer):
        for names in (batch, b"abc"):
            with pytest.raises(InvalidTypeError, match=r"takes shard ids, not a .*flatten_shard_ids"):
                call(names)  # type: ignore[operator]
    assert td.rtensor.remove(td.rtensor.flatten_shard_ids(batch)) == 1


def test_a_tensor_that_lost_its_memory_is_not_taken_for_zeros() -> None:
    lost = torch.ones(3)
    lost.untyped_storage().resize_(0)
    zeros = torch._efficientzerotensor((3,))
    for both in ([zeros, lost], [lost, zeros]):
        with pytest.raises(TundishError, match="has no values"):
            remotize(both)


def test_tensors_stand_among_handles() -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    batch = {"handle": remotize(torch.zeros(2)), "tensor": tensor, "parameter": parameter}
    found = localize(batch)
    assert found["tensor"] is tensor and found["parameter"] is parameter
    again = localize(found)
    assert again["handle"] is found["handle"]
    assert td.rtensor.flatten_shard_ids(tensor) == []
    with Controller([Worker(td.rtensor.serve().addr)]) as controller:
        assert controller.clear_batches(parameter).shards == 0
        with controller.step(claim=batch):
            pass
    assert td.rtensor.storage_stats()["num_tensors"] == 0


def test_a_server_takes_peers_and_changes_nothing_where_it_fails() -> None:
    for peers in ("127.0.0.1:4000", 3):
        with pytest.raises(InvalidTypeError, match="give a list of addresses"):
            td.rtensor.serve(peers=peers)  # type: ignore[arg-type]
    calls: list[Callable[[], Any]] = [
        lambda: td.rtensor.serve(peers=["junk"]),
        lambda: td.rtensor.trust("no address", token="x"),
        lambda: td.rtensor.trust(3, token="x"),  # type: ignore[arg-type]
        lambda: td.rtensor.trust("127.0.0.1:1", token="€"),
        lambda: td.rtensor.trust("127.0.0.1:1", token=""),
    ]
    with pytest.raises(InvalidTypeError, match=r"trust needs token=: give the servers' token"):
        td.rtensor.trust("127.0.0.1:1")
    for tls in ("node.pem", ("node.pem",), ("node.pem", 3), 3):
        with pytest.raises(
            InvalidTypeError, match=r"tls is .*: give the paths of two PEM files, \(certificate, key"
        ):
            td.rtensor.serve(token="x", tls=tls)  # type: ignore[arg-type]
    for call in calls:
        with pytest.raises(InvalidInputError):
            call()
    td.rtensor.serve().close()
    limit = td.rtensor.storage_stats()["memory"]["limit_bytes"]
    td.rtensor.serve().close()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StorageError):
        td.rtensor.serve(port=taken.getsockname()[1], limit_bytes=12345)
    with pytest.raises(StorageError, match="cannot find the address"):
        td.rtensor.serve("h\ud800", token="x")
    assert td.rtensor.storage_stats()["memory"]["limit_bytes"] == limit


def test_a_server_that_a_store_started_is_named_so() -> None:
    td.rtensor.serve().close()
    remotize(torch.ones(1))
    with pytest.raises(InvalidInputError, match=r"since remotize, store or .*: call serve first"):
        td.rtensor.serve("0.0.0.0", token="x")
    # Now the caller has it, and can close it.
    server = td.rtensor.serve()
    with pytest.raises(InvalidInputError, match="with other arguments: close that server first"):
        td.rtensor.serve("0.0.0.0", token="x")
    server.close()


def test_one_address_and_one_name_are_taken() -> None:
    server = td.rtensor.serve()
    assert list(td.rtensor.process_stats(server.addr)) == [server.addr]
    with pytest.raises(InvalidTypeError, match="addresses is 3: give a list"):
        td.rtensor.process_stats(3)  # type: ignore[arg-type]
    td.rtensor.store("abc", torch.ones(1))
    # Only what other processes own is in the fetch buffer.
    assert td.rtensor.clear_fetch_buffer("abc") == 0
    assert td.rtensor.remove("abc") == 1


def test_a_server_takes_an_address_in_brackets() -> None:
    td.rtensor.serve().close()
    if has_address("::1"):
        with td.rtensor.serve("[::1]") as server:
            assert server.addr.startswith("[::1]:")
    else:
        # It is found then, but not this machine's.
        with pytest.raises(StorageError, match="listen"):
            td.rtensor.serve("[::1]")


def has_address(address: str) -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def test_other_calls_name_the_refused_argument() -> None:
    handle = remotize(torch.ones(3))
    calls: list[Callable[[], Any]] = [
        lambda: td.rtensor.store(3, torch.ones(1)),  # type: ignore[arg-type]
        lambda: td.rtensor.fetch(3),  # type: ignore[arg-type]
        lambda: td.rtensor.store("x", torch.ones(1), timeout=NAN),
        lambda: localize(handle, timeout=None),  # type: ignore[arg-type]
        lambda: localize(handle, timeout=NAN),
        lambda: remotize(torch.ones(1), timeout=NAN),
        lambda: localize(handle, out=torch.ones(1).expand(3)),
        lambda: localize(handle, out=3),  # type: ignore[arg-type]
        lambda: localize(handle, out=torch.empty(3, device="meta")),
        lambda: localize(handle, out=torch.ones(3).to_sparse()),
        lambda: localize(handle, timeout=-(10**400)),
    ]
    for call in calls:
        with pytest.raises((InvalidTypeError, InvalidInputError)):
            call()
    assert torch.equal(localize(handle, timeout=10**400), torch.ones(3))


def test_output_buffers_are_checked_even_without_handles() -> None:
    with pytest.raises(InvalidTypeError, match="out is an int: give a tensor, or a list"):
        localize([], out=5)  # type: ignore[arg-type]
    for out in (torch.ones(1), [torch.ones(1)], iter([torch.ones(1)])):
        with pytest.raises(InvalidInputError, match="out has 1 tensor and obj has 0 handles"):
            localize(["no handle"], out=out)  # type: ignore[arg-type]
    for nothing in ([], (), iter([])):
        assert localize(["no handle"], out=nothing) == ["no handle"]  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [td.rtensor.remove, td.rtensor.clear_fetch_buffer])
@pytest.mark.parametrize("names", ["handle", 3])
def test_handles_in_place_of_names_are_refused_with_a_hint(call: Callable[[Any], int], names: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"takes shard ids.*flatten_shard_ids"):
        call(remotize(torch.ones(3)) if names == "handle" else names)


@pytest.mark.parametrize("limit", ["limit_bytes", "buffer_limit_bytes"])
def test_a_limit_is_a_number_of_bytes(limit: str) -> None:
    td.rtensor.serve().close()
    for value in (0, -1, 1.5, True, "1GB", 2**63):
        with pytest.raises(InvalidInputError, match=f"^{limit} is .*: give a number of bytes"):
            td.rtensor.serve(**{limit: value})  # type: ignore[arg-type]
    with td.rtensor.serve(**{limit: np.int64(2**30)}) as server:  # type: ignore[arg-type]
        assert "127.0.0.1:" in server.addr


def test_step_numbers_that_json_cannot_hold_are_refused() -> None:
    def begin(addr: str, number: int) -> int:
        connection = http.client.HTTPConnection(addr, timeout=60)
        connection.request("POST", f"/step/{number}/begin")
        status = connection.getresponse().status
        connection.close()
        return status

    with Peer() as peer:
        for number in ((1 << 64) - 1, 1 << 53):
            assert begin(peer.addr, number) == 400
        assert begin(peer.addr, (1 << 53) - 1) == 200
        with Controller([Worker(peer.addr)]) as controller:
            for _ in range(2):
                with controller.step() as step:
                    assert step.number < (1 << 53) - 1
    # And for a process alone.
    default_store.shards.begin_step((1 << 53) - 1, 7)
    try:
        for _ in range(2):
            with td.rtensor.step() as alone:
                assert alone.number < (1 << 53) - 1
    finally:
        default_store.shards.release_claimant(7)
