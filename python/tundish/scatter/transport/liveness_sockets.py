"""TCP connections between the source and ranks of other nodes, through which each notices the end of the other.

gloo does not always say so: a rank in the middle of a message may wait for a dead peer without end. Nothing travels on
these connections after the handshake.

Invariants:
- A connection is kept only where both ends showed the secrets that the source sent through the job's store.
- If no connection can be made, because of a firewall for example, only timeouts tell of a lost rank.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from typing import Any

from tundish.distributed import store_address
from tundish.own_address import OUTSIDE, address_towards

__all__ = ["LivenessListener", "connect_to_source", "is_source"]

_BACKLOG = 4096
_CONNECT_SECONDS = 2.0
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sq")
# A machine that vanished is asked after 10 s of silence, three times, every 5 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

# Hosts, port, the secret that a receiver shows, the secret that the source shows.
Invitation = tuple[list[str], int, str, str]


class LivenessListener:
    """The source's end. `store`: the job's store."""

    def __init__(self, store: Any) -> None:
        self._secrets = secrets.token_bytes(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES)
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual
        )
        port: int = self._listener.getsockname()[1]
        receivers_secret, own_secret = (one.hex() for one in self._secrets)
        self.invitation: Invitation = _own_addresses(store), port, receivers_secret, own_secret

    def accept(self) -> dict[int, socket.socket]:
        """The connections that ranks have made by now."""
        found: dict[int, socket.socket] = {}
        self._listener.settimeout(0)
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                rank = self._rank_of(connection)
                if rank is None:
                    connection.close()
                else:
                    found[rank] = connection
        return found

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _rank_of(self, connection: socket.socket) -> int | None:
        receivers_secret, own_secret = self._secrets
        # A receiver of this job has sent its hello before the vote that led here.
        connection.settimeout(0)
        with contextlib.suppress(OSError):
            hello = connection.recv(_HELLO.size)
            if len(hello) == _HELLO.size:
                secret, rank = _HELLO.unpack(hello)
                if secrets.compare_digest(secret, receivers_secret):
                    connection.sendall(own_secret)
                    _keep_alive(connection)
                    return int(rank)
        return None


def connect_to_source(invitation: Invitation, rank: int) -> socket.socket | None:
    """A connection to the source, on which this rank has sent its number; None if the source cannot be reached."""
    hosts, port, receivers_secret, _ = invitation
    for host in hosts:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), _CONNECT_SECONDS)
            try:
                connection.sendall(_HELLO.pack(bytes.fromhex(receivers_secret), rank))
            except OSError:
                connection.close()
                raise
            return connection
    return None


def is_source(connection: socket.socket, invitation: Invitation) -> bool:
    """Whether the other end shows the source's secret; else the connection is closed."""
    with contextlib.suppress(OSError):
        connection.settimeout(_CONNECT_SECONDS)
        secret = connection.recv(_SECRET_BYTES, socket.MSG_WAITALL)
        if secrets.compare_digest(secret, bytes.fromhex(invitation[3])):
            _keep_alive(connection)
            return True
    connection.close()
    return False


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _own_addresses(store: Any) -> list[str]:
    """Addresses at which other nodes may reach this machine, the most likely first."""
    store_host = store_address(store)
    to_store = None if store_host is None else address_towards(store_host)
    to_others = address_towards(OUTSIDE)
    if to_store is not None and to_store.startswith("127."):
        # This machine serves the store, and may know its own name for a loopback address.
        to_store, to_others = to_others, to_store
    return list(dict.fromkeys(address for address in (to_store, to_others) if address is not None))
