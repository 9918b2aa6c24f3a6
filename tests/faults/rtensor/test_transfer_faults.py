"""Transfers that are cut, damaged, late or interrupted, and processes that are killed in the middle of them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.distributed.programs import PIPE, Program
from support.interrupts import until_it_waits
from support.rtensor import peer_functions
from support.rtensor.peers import Peer, PeerError
from support.waiting import NOTICED, until

from tundish import rtensor
from tundish.errors import ShardGoneError, TransferError
from tundish.rtensor import Controller, Worker

LARGE = 8 << 20


@pytest.fixture
def owner() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


@pytest.fixture
def over_sockets() -> Iterator[None]:
    rtensor.set_backend(rtensor.HttpBackend(shared_memory=False))
    yield
    peer_functions.clear()
    rtensor.set_backend(None)


class ChangingProxy:
    """Forwards bytes between a consumer and an owner; `change` changes or drops the answers."""

    def __init__(self, addr: str, change: Callable[[bytes, int], bytes | None]) -> None:
        self._to = addr
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.addr = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def handle(self, handle: rtensor.RTensor) -> rtensor.RTensor:
        return rtensor.RTensor(handle.shard._replace(node_addr=self.addr), handle.data)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                consumer, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self._to.rpartition(":")
            owner = socket.create_connection((host, int(port)))
            threading.Thread(
                target=self._pass, args=(consumer, owner, lambda data, _: data), daemon=True
            ).start()
            threading.Thread(target=self._pass, args=(owner, consumer, self._change), daemon=True).start()

    @staticmethod
    def _pass(
        source: socket.socket, target: socket.socket, change: Callable[[bytes, int], bytes | None]
    ) -> None:
        passed = 0
        with source, target:
            try:
                while data := source.recv(1 << 16):
                    changed = change(data, passed)
                    if changed is None:
                        break
                    target.sendall(changed)
                    passed += len(data)
            except OSError:
                pass
            for one in (source, target):
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


@pytest.mark.usefixtures("over_sockets")
@pytest.mark.parametrize("size", [1000, LARGE // 8])
def test_damaged_and_truncated_bodies_are_refused(owner: Peer, size: int) -> None:
    handle = owner.call(peer_functions.make, 1, size, 5)[0]

    def damaged(data: bytes, passed: int) -> bytes:
        # In the middle of the values.
        at = size * 4 - passed
        return data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :] if 0 <= at < len(data) else data

    def truncated(data: bytes, passed: int) -> bytes | None:
        return data if passed + len(data) < size * 4 else None

    for change in (damaged, truncated):
        between = ChangingProxy(owner.addr, change)
        try:
            with pytest.raises(TransferError, match=between.addr) as raised:
                rtensor.localize(between.handle(handle), timeout=10)
            assert isinstance(raised.value, ConnectionError)
        finally:
            between.close()
    stats = rtensor.fetch_buffer_stats()
    assert stats["num_entries"] == stats["in_flight"] == stats["total_bytes"] == 0
    assert int(rtensor.localize(handle).sum()) == size * 5


@pytest.mark.usefixtures("over_sockets")
def test_an_owner_that_is_killed_is_named_at_once(owner: Peer) -> None:
    handle = owner.call(peer_functions.make, 1, LARGE)[0]
    with Peer() as consumer:
        owner.signal(signal.SIGSTOP)
        consumer.begin(peer_functions.sums_over_sockets, [handle])
        time.sleep(0.2)
        assert not consumer.has_answered()
        start = time.monotonic()
        owner.kill()
        with pytest.raises(PeerError, match=owner.addr) as raised:
            consumer.result()
        assert raised.value.kind == "TransferError" and time.monotonic() - start < NOTICED
        start = time.monotonic()
        with pytest.raises(PeerError, match=f"{handle.shard_id}.*{owner.addr}"):
            consumer.call(peer_functions.sums, [handle])
        assert time.monotonic() - start < NOTICED
        stats = consumer.call(peer_functions.stats)[1]
        assert stats["num_entries"] == stats["in_flight"] == 0
        # One that lives serves it as ever.
        assert consumer.call(peer_functions.sums, consumer.call(peer_functions.make, 1, 10, 2)) == [20]


def test_a_consumer_that_is_killed_leaves_nothing_with_the_owner(owner: Peer) -> None:
    handles = owner.call(peer_functions.make, 2, LARGE)
    for way in (peer_functions.sums_over_sockets, peer_functions.hold):
        with Peer() as consumer:
            consumer.begin(way, handles)
            if way is peer_functions.hold:
                consumer.result()
            consumer.kill()
    assert owner.call(peer_functions.sums, handles[1:]) == [LARGE]
    with Controller([Worker(owner.addr)]) as controller:
        assert controller.clear_batches(handles).shards == 2
    until(
        lambda: owner.call(peer_functions.stats)[0]["memory"]["escaped_bytes"] == 0,
        "a dead consumer holds memory",
    )


def test_late_arrivals_are_refused_and_counted(owner: Peer) -> None:
    handle = owner.call(peer_functions.make, 1, 1000)[0]
    with Peer() as consumer, Controller([Worker(consumer.addr)]) as controller:

        def in_flight() -> bool:
            (stats,) = controller.stats().values()
            assert isinstance(stats, dict)
            return bool(stats["buffer"]["in_flight"])

        with controller.step(number=120):
            owner.signal(signal.SIGSTOP)
            consumer.begin(peer_functions.sums_over_sockets, [handle])
            until(in_flight, "the fetch does not begin")
        owner.signal(signal.SIGCONT)
        with pytest.raises(PeerError, match="step 120 ended and was drained") as raised:
            consumer.result()
        assert raised.value.kind == "ShardGoneError"
        left = consumer.call(peer_functions.stats)[1]
        assert left["late_inserts_refused"] == 1 and left["num_entries"] == left["total_bytes"] == 0


@pytest.mark.usefixtures("over_sockets")
def test_threads_that_wait_for_a_fetch_share_its_failure_and_the_next_asks_anew(owner: Peer) -> None:
    handle = owner.call(peer_functions.make, 1, 1000, 1)[0]
    cut = [True]
    between = ChangingProxy(owner.addr, lambda data, _: None if cut[0] else data)
    handle, failures = between.handle(handle), []

    def fetch() -> None:
        try:
            rtensor.localize(handle, timeout=10)
        except TransferError as error:
            failures.append(error)

    try:
        threads = [threading.Thread(target=fetch) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(failures) == 6
        cut[0] = False
        assert int(rtensor.localize(handle).sum()) == 1000
    finally:
        between.close()


def test_a_child_made_by_fork_has_nothing_and_takes_nothing() -> None:
    with Peer() as peer:
        handles = peer.call(peer_functions.make, 3, 1000, 1)
        assert peer.call(fork_and_look, handles) == 0
        assert peer.call(peer_functions.sums, handles) == [1000, 2000, 3000]
        assert peer.call(peer_functions.stats)[0]["num_tensors"] == 3


def fork_and_look(handles: Any) -> int:
    """The exit code of a child that looks around."""
    addr = rtensor.serve().addr
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert rtensor.storage_stats()["num_tensors"] == rtensor.fetch_buffer_stats()["num_entries"] == 0
            # The parent's, fetched from it.
            assert [int(one[0]) for one in rtensor.localize(handles)] == [1, 2, 3]
            assert rtensor.serve().addr != addr
            own = rtensor.remotize(torch.ones(4))
            assert int(own.to_local().sum()) == 4 and rtensor.storage_stats()["num_tensors"] == 1
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_ctrl_c_ends_a_fetch_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        script = (
            "import torch, tundish as td; R = td.rtensor\n"
            f"shard = R.TensorShardInfo('a', '127.0.0.1:{silent.getsockname()[1]}')\n"
            "print('begin', flush=True)\n"
            "try: R.localize(R.RTensor(shard, torch.empty(9, device='meta')))\n"
            "except KeyboardInterrupt: print('interrupted', R.fetch_buffer_stats()['in_flight'], flush=True)\n"
        )
        with Program(["-c", script], stdout=PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == "begin\n"
            connection, _ = silent.accept()
            with connection:
                until_it_waits(process.pid)
                start = time.monotonic()
                process.send_signal(signal.SIGINT)
                assert process.stdout.readline() == "interrupted 0\n"
            assert time.monotonic() - start < NOTICED
            assert process.wait(20) == 0


def test_silent_and_slow_clients_hold_up_no_other(owner: Peer) -> None:
    handles = owner.call(peer_functions.make, 1, 1000, 1)
    host, _, port = owner.addr.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(300)]
    try:
        for number, one in enumerate(silent):
            one.sendall(
                (b"", b"GET /st", b"PUT /data/x HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\nabc")[
                    number % 3
                ]
            )
        with Peer() as consumer:
            start = time.monotonic()
            assert consumer.call(peer_functions.sums_over_sockets, handles) == [1000]
            assert time.monotonic() - start < NOTICED
        assert owner.call(peer_functions.stats)[0]["num_tensors"] == 1
    finally:
        for one in silent:
            one.close()


def test_workers_that_lost_the_controllers_connection_are_drained(owner: Peer) -> None:
    """They take the end of the connection for the controller's: claims are given up, and fetches belong to no step."""
    with Peer() as consumer:
        cuts: list[list[None]] = [[], []]
        ways = [
            ChangingProxy(peer.addr, lambda data, _, cut=cut: cut.pop() if cut else data)
            for peer, cut in zip((owner, consumer), cuts, strict=True)
        ]
        handles = [ways[0].handle(one) for one in owner.call(peer_functions.make, 3, 1000, 1)]
        workers = [Worker(ways[0].addr, "rollout"), Worker(ways[1].addr, "actor")]
        try:
            with Controller(workers) as controller:

                def has_given_up(worker: Worker) -> bool:
                    stats = controller.stats()[worker]
                    return isinstance(stats, dict) and stats["current_step"] is None

                for _ in range(2):
                    with controller.step(claim=handles[:2]):
                        # The next answer is lost; the request is sent again on a new connection.
                        for cut in cuts:
                            cut.append(None)
                        assert not [one for one in controller.stats().values() if isinstance(one, Exception)]
                        assert cuts == [[], []]
                        until(
                            lambda: all(map(has_given_up, workers)), "the end of a connection is not noticed"
                        )
                        until(
                            lambda: owner.call(peer_functions.stats)[0]["unclaimed_entries"] > 1,
                            "claims stay",
                        )
                        assert consumer.call(peer_functions.sums, handles)[0] == 1000
                        assert consumer.call(peer_functions.stats)[1]["num_entries"] == 3
                    assert owner.call(peer_functions.stats)[0]["num_tensors"] == 1
                    # Shards that were fetched without the connection end with the next step.
                    with controller.step():
                        pass
                    assert consumer.call(peer_functions.stats)[1]["num_entries"] == 0
                    handles[:2] = [ways[0].handle(one) for one in owner.call(peer_functions.make, 2, 1000, 1)]
        finally:
            for way in ways:
                way.close()


def test_the_error_of_a_dead_owner_names_shard_and_address(owner: Peer) -> None:
    handle = owner.call(peer_functions.make, 1, 10)[0]
    owner.kill()
    with pytest.raises(TransferError, match=f"{handle.shard_id}.*{owner.addr}"):
        handle.to_local()
    assert not isinstance(TransferError("x"), ShardGoneError)
