"""Workers that keep a controller waiting for ever, or say what no worker says: it waits no longer than it was told."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.rtensor.fake_worker import FakeWorker
from support.waiting import NOTICED

import tundish as td
from tundish import cli, rtensor
from tundish.errors import DrainError, TransferError
from tundish.rtensor import Controller, Worker

# The control says 0.2 s; a machine that is busy with other tests takes longer, and for ever is longer still.
_TIMEOUT = 0.2


@contextlib.contextmanager
def dripping(first: bytes, drip: bytes) -> Iterator[str]:
    """Where somebody answers everybody with `first`, and then with `drip` again and again. The address."""
    over = threading.Event()

    def serve(one: socket.socket) -> None:
        with one, contextlib.suppress(OSError):
            one.recv(1 << 16)
            one.sendall(first)
            while not over.wait(0.02):
                one.sendall(drip)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = listener.accept()
                serving.append(threading.Thread(target=serve, args=(one,)))
                serving[-1].start()

    serving: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *serving):
                thread.join()


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Header: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b" "),
    ],
    ids=["header", "continue", "chunk", "body"],
)
def test_a_slow_answer_has_a_deadline(first: bytes, drip: bytes) -> None:
    with dripping(first, drip) as addr, Controller([Worker(addr)], timeout=_TIMEOUT) as controller:
        began = time.monotonic()
        (answer,) = controller.stats().values()
        assert isinstance(answer, TransferError) and "does not answer" in str(answer)
        assert time.monotonic() - began < NOTICED


def test_a_drain_function_that_does_not_end_has_failed() -> None:
    over = threading.Event()
    calls: list[list[str]] = []

    def drain(ids: list[str]) -> None:
        calls.append(ids)
        assert over.wait(60)

    worker = Worker("inference", "server", 0, drain)
    began = time.monotonic()
    try:
        with Controller([worker], timeout=_TIMEOUT) as controller:
            with controller.step():
                pass
            with pytest.raises(DrainError, match=r"server 0 at inference.*still runs"):
                controller.step().__enter__()
            assert time.monotonic() - began < NOTICED
            # It is not called again as long as it is at it.
            assert len(calls) == 1
            over.set()
            with controller.step():
                pass
            assert len(calls) == 3
    finally:
        over.set()


@pytest.mark.parametrize(
    ("buffer", "stats"),
    [
        (
            {
                "num_entries": float("inf"),
                "total_bytes": 1,
                "current_entries": 0,
                "current_bytes": 0,
                "kept_entries": 0,
                "kept_bytes": 0,
            },
            {"steps": [1]},
        ),
        ({"num_entries": "many"}, {"steps": [{"step": "x"}, {"step": float("inf")}]}),
        ([1], {"steps": 3}),
    ],
)
def test_nonsense_in_an_answer_stops_no_training(buffer: Any, stats: Any) -> None:
    said: dict[str, Any] = {"/buffer/stats": buffer, "/stats": stats}
    otherwise = {"held_bytes": "x", "viewed_bytes": "y", "kept_count": "z", "kept_shard_ids": [["x"], 3]}
    otherwise |= {"missing_shard_ids": 3, "taken_shard_ids": {"x": None}}
    steps = []
    with (
        FakeWorker(lambda path: said.get(path, otherwise)) as worker,
        Controller([Worker(worker.addr)], timeout=60) as controller,
    ):
        handle = rtensor.RTensor(rtensor.TensorShardInfo("x", worker.addr), torch.empty(1, device="meta"))
        for _ in range(2):
            with controller.step(claim=handle) as step:
                controller.keep(handle)
                steps.append(step.number)
    assert steps == sorted(set(steps))


def test_the_command_recognizes_servers_that_are_no_workers(capsys: pytest.CaptureFixture[str]) -> None:
    for answer in ({}, {"storage": 1, "buffer": {}}, [], "text"):
        with FakeWorker(lambda _, answer=answer: answer) as other:  # type: ignore[misc]
            assert cli.main(["rtensor", "stats", other.addr]) == 1
        shown = capsys.readouterr()
        assert other.addr in shown.err and "process of tundish" in shown.err and not shown.out.strip()
    nested = b"[" * 100_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(nested)
    with dripping(head + nested, b"") as addr:
        assert cli.main(["rtensor", "stats", addr]) == 1
    assert addr in capsys.readouterr().err


def test_the_command_refuses_invalid_addresses_and_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    for addr in ("a b:1", "a/b:1", "[::1]:99999999999", "a\n:1"):
        assert cli.main(["rtensor", "stats", addr]) == 2
        assert "is not the address of a process" in capsys.readouterr().err
    assert cli.main(["rtensor", "stats", "a" * 80 + ":1"]) == 1
    assert "does not answer" in capsys.readouterr().err
    for content in (b"\xff\xfe\n", b"two words\n", b"\n", "€".encode()):
        (tmp_path / "token").write_bytes(content)
        assert cli.main(["rtensor", "stats", "127.0.0.1:1", "--token-file", str(tmp_path / "token")]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and str(tmp_path / "token") in lines[0]


def test_the_first_failure_ends_a_fetch_though_other_owners_are_silent() -> None:
    import torch

    meta = torch.empty(2, device="meta")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(9)]
        with socket.create_server(("127.0.0.1", 0)) as closed:
            ports = [one.getsockname()[1] for one in (closed, *silent)]
        handles = [
            td.rtensor.RTensor(td.rtensor.TensorShardInfo(f"x{port}", f"127.0.0.1:{port}"), meta)
            for port in ports
        ]
        began = time.monotonic()
        # Which owner the calling thread asks itself is left to chance: most are silent.
        with pytest.raises(TransferError, match=f"127.0.0.1:{ports[0]}"):
            td.rtensor.localize(handles, timeout=60)
        assert time.monotonic() - began < NOTICED
