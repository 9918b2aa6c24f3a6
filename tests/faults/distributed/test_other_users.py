"""The memory of votes and the sockets of watches are closed to a second user of the node."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from tundish._native import SharedVotes
from tundish.distributed import PeerWatch

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become another user")


def as_nobody(attempt: Callable[[], None]) -> str:
    """The kind of error that `attempt` raises as another user; "" for none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attempt()
            kind = ""
        except BaseException as error:
            kind = type(error).__name__
        os.write(write, kind.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as heard:
        kind = heard.read()
    os.waitpid(child, 0)
    return kind


def test_the_memory_in_which_ranks_vote_is_closed_to_another_user() -> None:
    memory = SharedVotes(2)
    address = memory.address
    assert address is not None
    assert as_nobody(lambda: SharedVotes.open(address, 2) and None) != ""
    # Its own user opens it.
    assert SharedVotes.open(address, 2) is not None


def test_another_user_that_connects_to_a_watch_makes_nobody_look_gone() -> None:
    peer, own = PeerWatch(), PeerWatch()
    own.connect({1: peer.address})

    def connect_and_leave() -> None:
        for address in (peer.address, own.address):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(f"\0{address}")
                stranger.sendall(b"gone")

    assert as_nobody(connect_and_leave) == ""
    assert own.vanished() == frozenset()
    peer.close()
    own.wait(10)
    assert own.vanished() == {1}
    own.close()
