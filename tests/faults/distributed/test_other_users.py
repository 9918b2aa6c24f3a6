"""The sockets of watches are proof against a second user of the node."""

from __future__ import annotations

import os
import socket

import pytest
from support.other_user import as_nobody

from tundish.distributed import PeerWatch

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become another user")


def test_another_user_that_connects_to_a_watch_makes_nobody_look_gone() -> None:
    peer, own = PeerWatch(), PeerWatch()
    own.connect({1: peer.address})

    def connect_and_leave() -> None:
        for address in (peer.address, own.address):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(f"\0{address}")
                stranger.sendall(b"gone")

    as_nobody(connect_and_leave)
    assert own.vanished() == frozenset()
    peer.close()
    own.wait(10)
    assert own.vanished() == {1}
    own.close()
