"""Another user of the node tries to use the server of a process: read, write, drain, exhaust."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time

import pytest
import torch
from support.other_user import as_nobody, start_as_nobody
from support.waiting import NOTICED

from tundish import rtensor
from tundish.errors import TransferError
from tundish.rtensor.tensor_store import default_store

_WAIT_SECONDS = 30.0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


# A request needs this codec, and another user may not be able to read its file.
"localhost".encode("idna")


def status_of(addr: str, method: str, path: str, body: str = "", token: str | None = None) -> int:
    connection = http.client.HTTPConnection(addr, timeout=_WAIT_SECONDS)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        return connection.getresponse().status


def test_another_user_can_do_nothing_without_a_token() -> None:
    with rtensor.serve() as server:
        handle = rtensor.remotize(torch.arange(10))
        names = f'{{"shard_ids": ["{handle.shard_id}"]}}'
        requests = [
            ("GET", f"/data/{handle.shard_id}", ""),
            ("POST", "/data/batch", names),
            ("PUT", "/data/mine", "TSHD"),
            ("DELETE", "/data/clear", names),
            ("DELETE", "/buffer/clear", ""),
            ("POST", "/step/1/begin", ""),
            ("POST", "/step/1/claim", names),
            ("POST", "/step/1/end", ""),
            ("POST", "/keep", names),
            ("GET", "/stats", ""),
            ("GET", "/metrics", ""),
            ("GET", "/health", ""),
        ]
        assert as_nobody(lambda: all(status_of(server.addr, *request) == 403 for request in requests))
        assert status_of(server.addr, "GET", f"/data/{handle.shard_id}") == 200
        assert json.loads(default_store.shards.stats())["current_step"] is None
        default_store.shards.remove([handle.shard_id])


def test_another_user_who_has_the_token_is_served() -> None:
    with rtensor.serve(token="s3cret") as server:
        assert as_nobody(lambda: status_of(server.addr, "GET", "/stats") == 401)
        assert as_nobody(lambda: status_of(server.addr, "GET", "/stats", token="s3cret") == 200)


def test_metrics_are_open_to_everybody_on_request() -> None:
    with rtensor.serve(open_metrics=True) as server:
        assert as_nobody(lambda: status_of(server.addr, "GET", "/metrics") == 200)
        assert as_nobody(lambda: status_of(server.addr, "GET", "/health") == 200)
        assert as_nobody(lambda: status_of(server.addr, "GET", "/stats") == 403)


def test_connections_of_another_user_keep_nobody_out() -> None:
    with rtensor.serve() as server:
        parent, child_end = os.pipe()

        def connect_often() -> None:
            connections = [http.client.HTTPConnection(server.addr, timeout=_WAIT_SECONDS) for _ in range(300)]
            for connection in connections:
                connection.connect()
            os.write(child_end, b"x")
            time.sleep(_WAIT_SECONDS)

        child = start_as_nobody(connect_often)
        try:
            assert os.read(parent, 1) == b"x"
            begin = time.monotonic()
            assert status_of(server.addr, "GET", "/health") == 200
            assert time.monotonic() - begin < NOTICED
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(parent)
            os.close(child_end)


def test_another_user_who_answers_for_an_owner_gives_no_tensors() -> None:
    with rtensor.serve() as server:
        handle = rtensor.remotize(torch.arange(3))
        with contextlib.closing(http.client.HTTPConnection(server.addr, timeout=_WAIT_SECONDS)) as connection:
            names = json.dumps({"shard_ids": [handle.shard_id]})
            connection.request("POST", "/data/batch", names, {"Accept": "application/x-tundish-shards"})
            shards = connection.getresponse().read()
        default_store.shards.remove([handle.shard_id])
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(shards)

    reached = os.pipe()

    def answer(times: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            os.write(reached[1], listener.getsockname()[1].to_bytes(2, "little"))
            for _ in range(times):
                with listener.accept()[0] as client:
                    client.recv(1 << 16)
                    client.sendall(head + shards)
                    # Until the client closes it.
                    client.recv(1)

    def answered() -> rtensor.RTensor:
        addr = f"127.0.0.1:{int.from_bytes(os.read(reached[0], 2), 'little')}"
        return rtensor.RTensor(handle.shard._replace(node_addr=addr), handle.data)

    child = start_as_nobody(lambda: answer(10))
    try:
        with pytest.raises(TransferError, match="another user"):
            rtensor.localize(answered())
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    # The same answer of this user.
    threading.Thread(target=answer, args=(1,), daemon=True).start()
    assert rtensor.localize(answered()).tolist() == [0, 1, 2]
    for descriptor in reached:
        os.close(descriptor)
