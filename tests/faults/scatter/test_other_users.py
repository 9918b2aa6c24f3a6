"""Processes of other users cannot receive or send batches.

The names of a scatter's sockets can be read by every user of the machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed.rank_processes import Job, Line, outcome
from support.other_user import RAISED, as_nobody, start_as_nobody
from support.waiting import NOTICED

import tundish as td

GOT_NOTHING, GOT_SOMETHING, WAS_REFUSED = 0, 1, RAISED


def what_comes(line: socket.socket) -> int:
    line.settimeout(30)
    try:
        said, descriptors, _, _ = socket.recv_fds(line, 4096, 8)
    except ConnectionResetError:
        # The other end has not even read the message.
        return GOT_NOTHING
    return GOT_SOMETHING if said or descriptors else GOT_NOTHING


def stranger_calls_first(rank: int, line: Line) -> None:
    from tundish.scatter import rendezvous

    call, children = rendezvous._Rendezvous.connect_to_sender, []

    def calling(own: Any, channels: Any) -> None:
        if rank not in own._senders:
            call(own, channels)
            return
        began, begun = os.pipe()

        def claim() -> int:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(f"\0{own._sender_address[0]}")
                # With the number of the rank whose batch it wants.
                # It may be closed already.
                with contextlib.suppress(BrokenPipeError):
                    stranger.sendall(rendezvous._HELLO.pack(rank) + channels.watch.address.encode())
                os.write(begun, b".")
                return what_comes(stranger)

        children.append(start_as_nobody(claim))
        os.close(begun)
        # It is the first to connect.
        assert os.read(began, 1) == b"."
        os.close(began)
        call(own, channels)

    rendezvous._Rendezvous.connect_to_sender = calling  # type: ignore[method-assign]
    for number in range(3):
        given = [{"x": torch.full((50_000,), number)}] * 2 if rank == 0 else None
        assert (td.scatter_batch(given)["x"] == number).all()
    assert [one["shared_memory_ranks"] for one in td.scatter.stats()] == [1]
    for child in children:
        line.say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_another_user_s_process_that_claims_to_be_a_rank_gets_nothing(tmp_path: Path) -> None:
    with Job(stranger_calls_first, 2, tmp_path) as job:
        assert job.hear(1) == (GOT_NOTHING,)
        job.expect_end()


def stranger_fills_the_queue(rank: int, line: Line) -> None:
    from tundish.scatter import rendezvous

    call = rendezvous._Rendezvous.connect_to_sender

    def calling(own: Any, channels: Any) -> None:
        if rank in own._senders:

            def connect_often() -> None:
                # More often than a listener has room for; a connection stays in the queue when its maker has closed it.
                for _ in range(5000):
                    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                        stranger.setblocking(False)
                        with contextlib.suppress(BlockingIOError):
                            stranger.connect(f"\0{own._sender_address[0]}")

            as_nobody(connect_often)
        call(own, channels)

    rendezvous._Rendezvous.connect_to_sender = calling  # type: ignore[method-assign]
    begin = time.monotonic()
    assert td.scatter_batch([1, 2] if rank == 0 else None) == 1 + rank
    line.say(time.monotonic() - begin)


def test_connections_of_another_user_keep_no_rank_out(tmp_path: Path) -> None:
    with Job(stranger_fills_the_queue, 2, tmp_path) as job:
        assert max(seconds for (seconds,) in job.hear_all()) < NOTICED
        job.expect_end()


def stranger_answers(rank: int, line: Line) -> None:
    from tundish.scatter import rendezvous

    call, children = rendezvous._Rendezvous.connect_to_sender, []

    def calling(own: Any, channels: Any) -> None:
        if rank not in own._senders:
            call(own, channels)
            return
        trap = f"tundish-scatter-test-{os.getpid()}"
        began, begun = os.pipe()

        def answer() -> int:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(f"\0{trap}")
                listener.listen()
                os.write(begun, b".")
                listener.settimeout(30)
                with listener.accept()[0] as caller:
                    return what_comes(caller)

        children.append(start_as_nobody(answer))
        os.close(begun)
        assert os.read(began, 1) == b"."
        os.close(began)
        own._sender_address = (trap, *own._sender_address[1:])
        call(own, channels)

    rendezvous._Rendezvous.connect_to_sender = calling  # type: ignore[method-assign]
    begin = time.monotonic()
    kind, text, lost = outcome(lambda: td.scatter_batch([1, 2] if rank == 0 else None))
    line.say(kind, text, lost, time.monotonic() - begin)
    for child in children:
        line.say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    rendezvous._Rendezvous.connect_to_sender = call  # type: ignore[method-assign]
    assert td.scatter_batch([1, 2] if rank == 0 else None) == 1 + rank


def test_another_user_s_process_that_answers_for_the_source_is_refused_by_all(tmp_path: Path) -> None:
    with Job(stranger_answers, 2, tmp_path) as job:
        for kind, text, lost, seconds in job.hear_all():
            assert kind == "PeerFailedError" and "another user's process" in text, text
            assert lost in (0, 1)
            assert seconds < NOTICED
        assert job.hear(1) == (GOT_NOTHING,)
        job.expect_end()


@pytest.fixture(autouse=True)
def _needs_another_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may start another user's process")
