"""Fetches tensors from other processes, over sockets and through shared memory."""

from __future__ import annotations

import contextlib
import errno
import json
import select
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.rtensor import peer_functions
from support.rtensor.peers import Peer, PeerError

from tundish import rtensor
from tundish.errors import (
    InvalidInputError,
    NotAuthorizedError,
    ShardGoneError,
    ShardMismatchError,
    StorageError,
)
from tundish.rtensor.handles import handles_of


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Peer, Peer]]:
    with Peer() as owner, Peer() as consumer:
        yield owner, consumer


@pytest.fixture(autouse=True)
def empty(processes: tuple[Peer, Peer]) -> Iterator[None]:
    yield
    for peer in processes:
        peer.call(peer_functions.clear)
    peer_functions.clear()


@pytest.fixture(params=["shared memory", "sockets"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    rtensor.set_backend(rtensor.HttpBackend(shared_memory=request.param == "shared memory"))
    yield request.param
    rtensor.set_backend(None)


def ask(addr: str, method: str, path: str, content: Any = None, **headers: str) -> tuple[int, Any]:
    data = None if content is None else json.dumps(content).encode()
    headers = {"Accept": "application/json", "Content-Type": "application/json"} | headers
    request = urllib.request.Request(f"http://{addr}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.usefixtures("way")
def test_tensors_of_every_size_come(processes: tuple[Peer, Peer]) -> None:
    owner, _ = processes
    batch = {
        "large": torch.rand(3_000_000),
        "small": [torch.full((3,), number) for number in range(300)],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "bytes": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }
    handles = owner.call(peer_functions.remotize, batch)
    back = rtensor.localize(handles)
    assert torch.equal(back["large"], batch["large"]) and torch.equal(back["scalar"], batch["scalar"])
    assert all(torch.equal(one, two) for one, two in zip(back["small"], batch["small"], strict=True))
    assert back["empty"].shape == (0, 4)
    assert torch.equal(back["bytes"].view(torch.uint8), batch["bytes"].view(torch.uint8))


class _Pair(NamedTuple):
    one: Any
    other: Any


def _contents(tree: Any) -> Any:
    """A nested object as its classes, keys and the values of its tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return type(tree), [(key, _contents(part)) for key, part in tree.items()]
    return (type(tree), [_contents(part) for part in tree]) if isinstance(tree, list | tuple) else tree


@pytest.mark.parametrize(
    "around",
    [
        lambda one, other: one,
        lambda one, other: [one, other, one],
        lambda one, other: (other, one),
        lambda one, other: {"b": other, "a": one},
        lambda one, other: OrderedDict(b=other, a=one),
        lambda one, other: _Pair(other, one),
        lambda one, other: [one, 3, None],
        lambda one, other: {"a": one, "b": (other, {"c": [one]}), "d": []},
        lambda one, other: [(one,), _Pair([other], {})],
    ],
)
def test_containers_of_handles_keep_their_types(processes: tuple[Peer, Peer], around: Any) -> None:
    owner, _ = processes
    given = torch.arange(3), torch.ones(2, 2)
    handles = owner.call(peer_functions.remotize, list(given))
    tree = around(*handles)
    buffers = [torch.empty(handle.shape, dtype=handle.dtype) for handle in handles_of(tree)]
    for found in (rtensor.localize(tree), rtensor.localize(tree, out=buffers)):
        assert _contents(found) == _contents(around(*given))
        assert found is not tree


@pytest.mark.usefixtures("way")
def test_writes_of_a_consumer_are_its_own(processes: tuple[Peer, Peer]) -> None:
    owner, consumer = processes
    handle = owner.call(peer_functions.make, 1, 5000, 3)[0]
    first = rtensor.localize(handle)
    first.fill_(-1)
    assert int(rtensor.localize(handle).sum()) == 15_000
    assert consumer.call(peer_functions.sums, handle) == [15_000] and owner.call(
        peer_functions.sums, handle
    ) == [15_000]
    assert int(first.sum()) == -5000


@pytest.mark.usefixtures("way")
def test_reused_memory_shows_the_new_values(processes: tuple[Peer, Peer]) -> None:
    owner, _ = processes
    for step in range(8):
        handles = owner.call(peer_functions.make, 5, 100_003, 10 * step)
        for _ in range(2):
            back = rtensor.localize(handles)
            for number, tensor in enumerate(back):
                assert bool((tensor == 10 * step + number).all())
                # All of one, and a little of others: somewhere else in each step.
                place = 7001 * step + 511
                tensor[: 100_003 if number == step % 5 else 0] = -1
                tensor[place : place + 1500 * number] = -2
            del back, tensor
            rtensor.clear_fetch_buffer(rtensor.flatten_shard_ids(handles))
        assert sum(owner.call(peer_functions.sums, handles)) == 100_003 * sum(
            10 * step + number for number in range(5)
        )
        assert owner.call(peer_functions.remove, rtensor.flatten_shard_ids(handles)) == 5


@pytest.mark.usefixtures("way")
def test_each_shard_is_fetched_once_however_often_it_is_named(processes: tuple[Peer, Peer]) -> None:
    owner, _ = processes
    handles = owner.call(peer_functions.make, 3, 10)
    before = rtensor.fetch_buffer_stats()
    named = [handles[number % 3] for number in range(100_000)]
    back = rtensor.localize(named)
    assert len({id(tensor) for tensor in back}) == 3
    assert [int(tensor[0]) for tensor in back[:4]] == [0, 1, 2, 0]
    stats = rtensor.fetch_buffer_stats()
    assert stats["misses"] - before["misses"] == 3 and stats["num_entries"] == 3
    rtensor.localize(handles)
    again = rtensor.fetch_buffer_stats()
    assert (again["misses"], again["hits"] - stats["hits"]) == (stats["misses"], 3)


def test_threads_that_want_the_same_wait_for_one_fetch(processes: tuple[Peer, Peer]) -> None:
    owner, consumer = processes
    handles = owner.call(peer_functions.make, 4, 100_000)
    before = consumer.call(peer_functions.stats)[1]
    found = consumer.call(peer_functions.sums_in_threads, handles, 8)
    assert found == [[0, 100_000, 200_000, 300_000]] * 8
    assert consumer.call(peer_functions.stats)[1]["misses"] - before["misses"] == 4


@pytest.mark.usefixtures("way")
def test_rows_travel_alone(processes: tuple[Peer, Peer]) -> None:
    owner, _ = processes
    tensor = torch.rand(1000, 1000)
    handle = owner.call(peer_functions.remotize, tensor)
    part = rtensor.localize(handle[10:12])
    assert torch.equal(part, tensor[10:12])
    assert rtensor.fetch_buffer_stats()["total_bytes"] < 100_000
    room = torch.empty(2, 1000)
    assert torch.equal(rtensor.localize(handle[998:], out=room), tensor[998:])
    assert rtensor.fetch_buffer_stats()["num_entries"] == 2


@pytest.mark.usefixtures("way")
def test_a_removed_shard_is_gone(processes: tuple[Peer, Peer]) -> None:
    owner, _ = processes
    handles = owner.call(peer_functions.make, 2, 10)
    assert (
        ask(owner.addr, "DELETE", "/data/clear", {"shard_ids": [handles[0].shard_id] * 3})[1]["cleared_count"]
        == 1
    )
    with pytest.raises(ShardGoneError, match=handles[0].shard_id) as raised:
        rtensor.localize(handles)
    assert owner.addr in str(raised.value) and "drained or removed" in str(raised.value)
    assert isinstance(raised.value, KeyError)
    assert int(rtensor.localize(handles[1]).sum()) == 10


@pytest.mark.usefixtures("way")
def test_fetches_of_a_reused_name_read_the_old_tensor_until_the_step_ends(
    processes: tuple[Peer, Peer],
) -> None:
    owner, _ = processes
    with rtensor.step():
        old = owner.call(peer_functions.store, "weights", 10)
        assert int(rtensor.localize(old).sum()) == 70
        owner.call(peer_functions.remove, ["weights"])
        owner.call(peer_functions.store, "weights", 10, 8)
        assert int(rtensor.localize(old).sum()) == 70
    assert int(rtensor.localize(old).sum()) == 80


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "declared", [torch.empty(10), torch.empty(11, dtype=torch.int64), torch.empty(2, 5, dtype=torch.int64)]
)
def test_tensors_that_differ_from_their_handle_are_refused(
    processes: tuple[Peer, Peer], declared: torch.Tensor
) -> None:
    owner, _ = processes
    handle = owner.call(peer_functions.make, 1, 10)[0]
    wrong = rtensor.RTensor(handle.shard, declared.to("meta"))
    with pytest.raises(ShardMismatchError, match=r"int64\[10\]"):
        rtensor.localize(wrong)
    assert rtensor.fetch_buffer_stats()["num_entries"] == 0


def test_plain_http_does_it_too(processes: tuple[Peer, Peer]) -> None:
    owner, _ = processes
    handles = owner.call(peer_functions.make, 3, 4, 5)
    assert ask(owner.addr, "GET", "/health")[0] == 200
    status, answer = ask(owner.addr, "GET", "/stats")
    assert status == 200 and answer["storage"]["num_entries"] == 3
    assert ask(owner.addr, "GET", "/data/unknown")[0] == 404
    ids = [handle.shard_id for handle in handles]
    status, answer = ask(owner.addr, "POST", "/data/batch", {"shard_ids": [ids[0], "unknown", "more"]})
    assert status == 400 and answer["missing_shard_ids"] == ["unknown", "more"]
    # As AReaL's clients ask, which say that they take anything.
    status, answer = ask(owner.addr, "POST", "/data/batch", {"shard_ids": ids}, Accept="*/*")
    assert (status, len(answer)) == (200, len(ids))
    assert ask(owner.addr, "GET", f"/data/{ids[0]}", Accept="*/*") == (200, answer[0])
    with urllib.request.urlopen(f"http://{owner.addr}/metrics", timeout=10) as response:
        text = response.read().decode()
    assert "tundish" in text and "# TYPE" in text


def test_tokens_go_only_to_named_addresses() -> None:
    with Peer(host="127.0.0.1", token="secret-of-the-job") as guarded:
        handle = guarded.call(peer_functions.make, 1, 10, 2)[0]
        assert ask(guarded.addr, "GET", "/stats")[0] == 401
        assert ask(guarded.addr, "GET", "/stats", Authorization="Bearer other")[0] == 401
        assert ask(guarded.addr, "GET", "/stats", Authorization="Bearer secret-of-the-job")[0] == 200
        with pytest.raises(NotAuthorizedError, match=guarded.addr) as raised:
            rtensor.localize(handle)
        assert isinstance(raised.value, PermissionError)
        rtensor.trust(guarded.addr, token="another")
        with pytest.raises(NotAuthorizedError):
            rtensor.localize(handle)
        rtensor.trust(guarded.addr, token="secret-of-the-job")
        assert int(rtensor.localize(handle).sum()) == 20
        with (
            Peer(token="secret-of-the-job", peers=[guarded.addr]) as peer,
            Peer(token="secret-of-the-job") as other,
        ):
            assert peer.call(peer_functions.sums, [handle]) == [20]
            with pytest.raises(PeerError) as refused:
                other.call(peer_functions.sums, [handle])
            assert refused.value.kind == "NotAuthorizedError"


def test_addresses_that_others_reach_want_a_token() -> None:
    with Peer() as peer:
        for options, kind in (
            ({"host": "0.0.0.0"}, "InvalidInputError"),
            ({"host": "203.0.113.7"}, "InvalidInputError"),
            ({"port": 70_000}, "InvalidInputError"),
            ({"token": "with space"}, "InvalidInputError"),
            ({"limit_bytes": 0}, "InvalidInputError"),
            # It serves already.
            ({"limit_bytes": 1 << 20}, "InvalidInputError"),
        ):
            with pytest.raises(PeerError) as raised:
                peer.call(serve_again, options)
            assert raised.value.kind == kind
        assert peer.call(serve_again, {}) == peer.addr
    with Peer(host="0.0.0.0", token="t") as open_to_all:
        assert not open_to_all.addr.startswith("0.0.0.0")


def serve_again(options: dict[str, Any]) -> str:
    return rtensor.serve(**options).addr


def test_a_port_that_is_taken_is_named() -> None:
    # A test before may have left this process serving.
    rtensor.serve().close()
    with Peer() as peer:
        port = int(peer.addr.rpartition(":")[2])
        with pytest.raises(StorageError, match=peer.addr) as raised, rtensor.serve(port=port):
            pass
        assert raised.value.errno == 98


def test_limits_hold_on_both_sides(processes: tuple[Peer, Peer]) -> None:
    owner, _ = processes
    with Peer(limit_bytes=1 << 20, buffer_limit_bytes=1 << 20) as small:
        with pytest.raises(PeerError, match="never fit") as raised:
            small.call(peer_functions.make, 1, 1 << 20)
        assert raised.value.kind == "TensorStoreFullError"
        large = owner.call(peer_functions.make, 1, 1 << 20)
        with pytest.raises(PeerError, match="never fit") as raised:
            small.call(peer_functions.sums_over_sockets, large)
        assert raised.value.kind == "TensorStoreFullError"
        # A tensor in its owner's memory takes none of the consumer's.
        assert small.call(peer_functions.sums, large) == [0]
        several = owner.call(peer_functions.make, 3, 50_000)
        with pytest.raises(PeerError, match="do not fit in the fetch buffer"):
            small.call(sums_one_by_one, several)


def sums_one_by_one(handles: Any) -> list[int]:
    rtensor.set_backend(rtensor.HttpBackend(shared_memory=False))
    return [int(rtensor.localize(handle, timeout=0.3).sum()) for handle in handles]


def test_a_server_that_was_closed_serves_no_more() -> None:
    with rtensor.serve() as server:
        handle = rtensor.remotize(torch.ones(3))
        assert handle.node_addr == server.addr and ask(server.addr, "GET", "/health")[0] == 200
    with pytest.raises(urllib.error.URLError):
        ask(server.addr, "GET", "/health")
    with rtensor.serve() as server:
        assert ask(server.addr, "GET", "/health")[0] == 200
    with pytest.raises(InvalidInputError, match="is not the address"):
        rtensor.Controller([rtensor.Worker("nowhere")])
    rtensor.clear_node()


def test_threads_that_begin_to_serve_at_once_share_a_server() -> None:
    addresses: set[str] = set()
    barrier = threading.Barrier(8)

    def serve() -> None:
        barrier.wait()
        addresses.add(rtensor.serve().addr)

    threads = [threading.Thread(target=serve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with rtensor.serve() as server:
        assert addresses == {server.addr}


def test_an_owner_that_is_busy_is_reached_by_many_at_once() -> None:
    with Peer() as owner, contextlib.ExitStack() as sockets:
        host, port = owner.addr.rsplit(":", 1)
        owner.signal(signal.SIGSTOP)
        poll, many = select.poll(), min(1000, int(Path("/proc/sys/net/core/somaxconn").read_text()))
        for _ in range(many):
            one = sockets.enter_context(socket.socket())
            one.setblocking(False)
            assert one.connect_ex((host, int(port))) in (0, errno.EINPROGRESS)
            poll.register(one, select.POLLOUT)
        deadline = time.monotonic() + 10
        while (reached := len(poll.poll(0))) < many and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reached == many
        owner.signal(signal.SIGCONT)
