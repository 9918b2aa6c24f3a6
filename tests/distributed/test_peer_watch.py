"""A watch takes no living peer for gone."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from tundish.distributed import peer_watch as watch
from tundish.distributed.peer_watch import PeerWatch


@contextlib.contextmanager
def filled(address: str) -> Iterator[None]:
    """A queue that has no room for anybody else."""
    with contextlib.ExitStack() as strangers:
        while True:
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stranger.setblocking(False)
            try:
                stranger.connect(f"\0{address}")
            except BlockingIOError:
                break
        yield


def test_a_queue_that_strangers_fill_makes_no_peer_look_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_BACKLOG", 2)
    monkeypatch.setattr(watch, "_CONNECT_SECONDS", 40.0)
    peer, own, other = PeerWatch(), PeerWatch(), PeerWatch()
    own.connect({1: peer.address})
    with filled(peer.address):
        began = time.monotonic()
        other.connect({1: peer.address})
        # time: a full queue refuses at once; otherwise it would be all of this
        assert time.monotonic() - began < watch._CONNECT_SECONDS
        assert other.vanished() == own.vanished() == frozenset()
        peer.close()
        # A watch that was connected before sees it.
        own.wait(30)
        assert own.vanished() == {1}
        assert other.vanished() == frozenset()
    for one in (own, other):
        one.close()


def test_a_lack_of_descriptors_makes_no_peer_look_gone() -> None:
    peer, own = PeerWatch(), PeerWatch()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        own.connect({1: peer.address})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    peer.close()
    assert own.vanished() == frozenset()
    own.close()
