"""`_native.WorkerClient`: small requests to other processes over one kept connection."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.interrupts import signal_once_waiting
from support.waiting import NOTICED

from tundish._native import ShardServer, ShardStore, WorkerClient
from tundish.errors import InvalidInputError, TimedOutError, TransferError


@pytest.fixture
def server() -> Iterator[ShardServer]:
    server = ShardServer(ShardStore(), "127.0.0.1", 0)
    yield server
    server.close()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A socket that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_requests_share_one_connection(server: ShardServer) -> None:
    client = WorkerClient(f"127.0.0.1:{server.port}")
    assert client.connection_number is None
    assert client.request("GET", "/health", timeout=10) == (200, b'{"status":"ok"}')
    first = client.connection_number
    status, text = client.request(
        "POST", "/step/2999/claim", json.dumps({"shard_ids": []}).encode(), timeout=10
    )
    assert (status, json.loads(text)["claimed_count"]) == (200, 0)
    assert client.request("GET", "/nothing", timeout=10)[0] == 404
    assert client.connection_number == first
    client.close()
    with pytest.raises(TransferError, match="closed by this process"):
        client.request("GET", "/health", timeout=10)


def test_a_lost_connection_is_replaced_and_has_another_number() -> None:
    server = ShardServer(ShardStore(), "127.0.0.1", 0)
    client = WorkerClient(f"127.0.0.1:{server.port}")
    client.request("GET", "/health", timeout=10)
    first = client.connection_number
    server.close()
    again = ShardServer(ShardStore(), "127.0.0.1", server.port)
    assert client.request("GET", "/health", timeout=10)[0] == 200
    assert client.connection_number not in (None, first)
    again.close()


def test_a_token_is_sent_with_each_request() -> None:
    server = ShardServer(ShardStore(), "127.0.0.1", 0, "s3cret")
    addr = f"127.0.0.1:{server.port}"
    assert WorkerClient(addr).request("GET", "/stats", timeout=10)[0] == 401
    assert WorkerClient(addr, "s3cret").request("GET", "/stats", timeout=10)[0] == 200
    server.close()


def test_a_refused_connection_is_an_error_at_once(silent: socket.socket) -> None:
    client = WorkerClient(address(silent))
    silent.close()
    with pytest.raises(TransferError, match="refused"):
        client.request("GET", "/health", timeout=60)


def test_a_silent_process_is_given_up_at_the_deadline(silent: socket.socket) -> None:
    client = WorkerClient(address(silent))
    begin = time.monotonic()
    with pytest.raises(TimedOutError, match=address(silent)):
        client.request("GET", "/health", timeout=0.2)
    assert time.monotonic() - begin >= 0.2


def test_a_connection_that_ends_in_mid_answer_is_an_error(silent: socket.socket) -> None:
    def answer() -> None:
        accepted, _ = silent.accept()
        accepted.recv(1000)
        accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        accepted.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(TransferError, match="in the middle of an answer"):
        WorkerClient(address(silent)).request("GET", "/health", timeout=30)
    thread.join()


def test_close_ends_a_request_of_another_thread(silent: socket.socket) -> None:
    client = WorkerClient(address(silent))
    timer = threading.Timer(0.2, client.close)
    timer.start()
    with pytest.raises(TransferError, match="closed by this process"):
        client.request("GET", "/health", timeout=60)
    timer.join()


def test_ctrl_c_ends_a_request(silent: socket.socket) -> None:
    client = WorkerClient(address(silent))
    begin = time.monotonic()
    timer = signal_once_waiting()
    with pytest.raises(KeyboardInterrupt):
        client.request("GET", "/health", timeout=60)
    assert time.monotonic() - begin < NOTICED
    timer.join()


def test_a_child_of_fork_holds_no_connection_open(silent: socket.socket) -> None:
    def answer(made: list[socket.socket]) -> None:
        accepted, _ = silent.accept()
        accepted.recv(1000)
        accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        made.append(accepted)

    made: list[socket.socket] = []
    thread = threading.Thread(target=answer, args=(made,))
    thread.start()
    client = WorkerClient(address(silent))
    assert client.request("GET", "/health", timeout=30) == (200, b"")
    thread.join()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        client.close()
        made[0].settimeout(10)
        assert made[0].recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        made[0].close()


@pytest.mark.parametrize(
    ("method", "path"), [("", "/"), ("GET\r\nX: y", "/"), ("GET", "stats"), ("GET", "/a b"), ("GET", "/\r\n")]
)
def test_methods_and_paths_that_break_a_request_are_refused(method: str, path: str) -> None:
    with pytest.raises(InvalidInputError):
        WorkerClient("127.0.0.1:1").request(method, path, timeout=1)
