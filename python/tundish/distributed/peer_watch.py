"""Notices at once that another process of the node has ended, because the kernel closes its connections.

A `PeerWatch` listens on one unix socket in the abstract namespace, which leaves no file behind, and holds a connection
to the socket of each watched peer. Only Linux has abstract sockets. On other systems nothing is watched, and a lost
peer is noticed by a timeout.

Invariants:

1. No process accepts or writes on these connections, so any event on one means that the peer ended or closed its watch.
   A connection from `add_connection` carries one message: why its peer closed its watch.
2. Sockets are closed on exec and in forked children. Otherwise a child would make its killed parent look alive.
3. A failed connection does not mean that the peer is dead, unless it is refused: strangers can fill a socket's queue.
4. Abstract sockets belong to a network namespace, so watched peers share one (`node_identity`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

_BACKLOG = 4096
_CONNECT_SECONDS = 5.0
# The message of a watch that closes: the rank whose end is the reason.
_CLOSE_MESSAGE = struct.Struct("<q")
_NO_RANK = -1

_open_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


@functools.cache
def node_identity() -> str:
    """A name that processes share exactly when they can watch each other and share memory.

    It consists of the host name, the kernel's boot id, and the network and IPC namespaces. Containers of one machine
    are nodes of their own.
    """
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.extend(str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "ipc"))
    except OSError:
        pass  # without /proc the host name is the identity
    return "/".join(parts)


class PeerWatch:
    """Watches peers. One thread at a time may use it; `vanished` is for any thread.

    Attributes:
        address: the name of this process's socket for the peers' `connect`; empty where the system has none.
    """

    def __init__(self) -> None:
        self.address = ""
        self._listener: socket.socket | None = None
        self._connections: dict[int, tuple[int, socket.socket]] = {}
        self._vanished: set[int] = set()
        self._close_causes: dict[int, int | None] = {}
        self._two_way: list[socket.socket] = []
        self._polling = threading.Lock()
        self._poll = select.poll()
        if sys.platform == "linux":
            self.address = f"tundish-watch-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self.address}")
            self._listener.listen(_BACKLOG)
        _open_watches.add(self)

    def connect(self, peers: Mapping[int, str]) -> None:
        """Watch `peers`, a mapping of rank to address. A peer that is gone already counts as vanished."""
        for rank, address in peers.items():
            if not address or not self.address:
                continue
            # Only a refusal means that the peer is dead. Descriptors may have run out, or the queue may be full.
            with contextlib.suppress(OSError):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(_CONNECT_SECONDS)
                try:
                    connection.connect(f"\0{address}")
                except OSError as error:
                    connection.close()
                    if isinstance(error, ConnectionRefusedError):
                        self._vanished.add(rank)
                    continue
                self._watch(rank, connection)

    def add_connection(self, rank: int, connection: socket.socket) -> None:
        """Watch `rank` by `connection`, whose other end that rank adds to its watch. The watch closes it."""
        connection.setblocking(False)
        self._two_way.append(connection)
        self._watch(rank, connection)

    def close_causes(self) -> Mapping[int, int | None]:
        """The ranks that closed their watch, each with the rank whose end was the reason, or None."""
        return dict(self._close_causes)

    def vanished(self) -> frozenset[int]:
        """The ranks that are gone."""
        self.wait(0)
        return frozenset(self._vanished)

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`; a sleep of a millisecond or more ends early when a peer vanishes."""
        # poll() takes whole milliseconds.
        if not self._connections or 0 < seconds < 0.001:
            if seconds > 0:
                time.sleep(seconds)
            return
        with self._polling:
            for descriptor, _ in self._poll.poll(math.ceil(seconds * 1000)):
                rank, connection = self._connections[descriptor]
                with contextlib.suppress(OSError):
                    message = connection.recv(_CLOSE_MESSAGE.size) if connection in self._two_way else b""
                    if len(message) == _CLOSE_MESSAGE.size:
                        (cause,) = _CLOSE_MESSAGE.unpack(message)
                        self._close_causes[rank] = None if cause == _NO_RANK else cause
                self._vanished.add(rank)
                self._poll.unregister(descriptor)
                del self._connections[descriptor]
                connection.close()

    def close(self, because_of: int | None = None) -> None:
        """Close every socket: peers that still watch this process see it vanish.

        `because_of`: the rank whose end is the reason.
        """
        message = _CLOSE_MESSAGE.pack(_NO_RANK if because_of is None else because_of)
        for connection in self._two_way:
            with contextlib.suppress(OSError):
                connection.send(message)
        self._close()

    def _watch(self, rank: int, connection: socket.socket) -> None:
        self._connections[connection.fileno()] = (rank, connection)
        self._poll.register(connection, select.POLLIN)

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for descriptor, (_, connection) in self._connections.items():
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
            connection.close()
        self._connections.clear()
        self._two_way.clear()
        _open_watches.discard(self)


def _close_in_child() -> None:
    for watch in list(_open_watches):
        watch._close()


os.register_at_fork(after_in_child=_close_in_child)
