"""Noticing at once that another process is gone, by what the kernel drops with it.

A `PeerWatch` owns one listening unix socket in the abstract namespace (it has no file, so nothing is
left on disk) and one connection to each peer's listening socket, for peers of this node, or whichever
connection it was given. What always holds:

1. Nobody accepts or writes: a connection stays silent until its peer's listening socket is gone, so
   any event on it means that the peer ended, was killed, or closed its watch. On one that was given the
   last of these is told, and because of whose end.
2. Only the process itself holds its sockets: they are closed on exec, and in children made by fork, which
   would otherwise keep a killed parent looking alive (workers of a DataLoader outlive their parent by
   seconds).
3. A peer is taken for gone by what the kernel says alone. Others on the machine can find a socket and fill its queue:
   a peer that does not get in watches nothing, and its deadlines have to do.
4. Abstract sockets belong to a network namespace: peers must share one (`node_identity` says so).

On systems without abstract sockets (all but Linux) nothing is watched, and only deadlines tell.
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

__all__ = ["PeerWatch", "node_identity"]

_BACKLOG = 4096
_CONNECT_SECONDS = 5.0
# Because of whose end, a rank, a watch is closed.
_FAREWELL = struct.Struct("<q")
_NOBODYS = -1

_open_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


@functools.cache
def node_identity() -> str:
    """A name that processes share exactly when they can watch each other and share memory.

    Made of the host's name, the kernel's boot id and the network and IPC namespaces, so that
    containers of one machine count as nodes of their own.
    """
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.extend(str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "ipc"))
    except OSError:
        pass  # no /proc: the host's name has to do
    return "/".join(parts)


class PeerWatch:
    """Watches peers; to be used by one thread at a time, but for `vanished`.

    `address` names this process's socket (empty where the system has none); peers pass it to `connect`.
    """

    def __init__(self) -> None:
        self.address = ""
        self._listener: socket.socket | None = None
        self._connections: dict[int, tuple[int, socket.socket]] = {}
        self._vanished: set[int] = set()
        # Of these, who said so, and because of whose end.
        self._departed: dict[int, int | None] = {}
        self._given: list[socket.socket] = []
        self._polling = threading.Lock()
        self._poll = select.poll()
        if sys.platform == "linux":
            self.address = f"tundish-watch-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self.address}")
            self._listener.listen(_BACKLOG)
        _open_watches.add(self)

    def connect(self, peers: Mapping[int, str]) -> None:
        """Watch `peers`, a mapping of rank to address; one that is gone already counts as vanished."""
        for rank, address in peers.items():
            if not address or not self.address:
                continue
            try:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError:
                # As below.
                continue
            connection.settimeout(_CONNECT_SECONDS)
            try:
                connection.connect(f"\0{address}")
            except ConnectionRefusedError:
                connection.close()
                self._vanished.add(rank)
                continue
            except OSError:
                # Out of descriptors, say: no sign of death. Deadlines have to do for this peer.
                connection.close()
                continue
            self._look_at(rank, connection)

    def adopt(self, rank: int, connection: socket.socket) -> None:
        """Watch `rank` by a connection to its watch, which adopts the other end; it is this watch's from here on."""
        connection.setblocking(False)
        self._given.append(connection)
        self._look_at(rank, connection)

    def departed(self) -> Mapping[int, int | None]:
        """Of the ranks that were found gone those that closed their watch, as far as that was told.

        With each the rank because of whose end it did so, where there was one.
        """
        return dict(self._departed)

    def vanished(self) -> frozenset[int]:
        """The ranks found gone so far."""
        self.wait(0)
        return frozenset(self._vanished)

    def wait(self, seconds: float) -> None:
        """Sleep `seconds`; of a millisecond or more less, where a watched peer vanishes meanwhile."""
        # poll() takes whole milliseconds, to which a shorter sleep must be rounded neither up nor down.
        if not self._connections or 0 < seconds < 0.001:
            # Sleeping for no time takes the system tens of microseconds.
            if seconds > 0:
                time.sleep(seconds)
            return
        with self._polling:
            for descriptor, _ in self._poll.poll(math.ceil(seconds * 1000)):
                rank, connection = self._connections[descriptor]
                with contextlib.suppress(OSError):
                    told = connection.recv(_FAREWELL.size) if connection in self._given else b""
                    if len(told) == _FAREWELL.size:
                        (whose,) = _FAREWELL.unpack(told)
                        self._departed[rank] = None if whose == _NOBODYS else whose
                # Ctrl-C, where this is the main thread, leaves it to be found once more or known already.
                self._vanished.add(rank)
                self._poll.unregister(descriptor)
                del self._connections[descriptor]
                connection.close()

    def close(self, because_of: int | None = None) -> None:
        """Close every socket; peers that still watch this process see it vanish.

        `because_of`: the rank whose end made it do so.
        """
        told = _FAREWELL.pack(_NOBODYS if because_of is None else because_of)
        for connection in self._given:
            with contextlib.suppress(OSError):
                connection.send(told)
        self._close()

    def _look_at(self, rank: int, connection: socket.socket) -> None:
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
        self._given.clear()
        _open_watches.discard(self)


def _close_in_child() -> None:
    for watch in list(_open_watches):
        watch._close()


os.register_at_fork(after_in_child=_close_in_child)
