"""Connections between the source and the ranks far away, by which each notices that the other is gone.

gloo does not always tell: who is in the middle of a message when the other end dies may wait for it without end. What
always holds: a connection is kept where both ends showed that they are the ones who were told of each other; where none
comes about, by a firewall say, nobody fails, and deadlines have to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import sys
from typing import Any

from tundish.distributed import store_address

__all__ = ["Calls", "call", "greeted"]

_BACKLOG = 4096
_CONNECT_SECONDS = 2.0
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sq")
# An address of no machine, to which no packet is ever sent: which of its own addresses the system would send it from.
_ELSEWHERE = "192.0.2.1"
# Of a peer whose machine is gone without a word: after which silence it is asked, how often, and how many times.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_SIOCGIFADDR = 0x8915

# Hosts, port, and what the caller and the one who answers say.
_Invitation = tuple[list[str], int, str, str]


class Calls:
    """The source's end, until all who call have been answered. `store`: the job's."""

    def __init__(self, store: Any) -> None:
        self._secrets = secrets.token_bytes(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES)
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual
        )
        port: int = self._listener.getsockname()[1]
        asked, answered = (one.hex() for one in self._secrets)
        self.invitation: _Invitation = _own_addresses(store), port, asked, answered

    def answer(self) -> dict[int, socket.socket]:
        """By rank, the connections of those who have called by now."""
        found: dict[int, socket.socket] = {}
        self._listener.settimeout(0)
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                rank = self._heard(connection)
                if rank is None:
                    connection.close()
                else:
                    found[rank] = connection
        return found

    def close(self) -> None:
        self._listener.close()

    def _heard(self, connection: socket.socket) -> int | None:
        asked, answered = self._secrets
        # Whoever has called has said so already.
        connection.settimeout(0)
        with contextlib.suppress(OSError):
            hello = connection.recv(_HELLO.size)
            if len(hello) == _HELLO.size:
                said, rank = _HELLO.unpack(hello)
                if secrets.compare_digest(said, asked):
                    connection.sendall(answered)
                    _keep_alive(connection)
                    return int(rank)
        return None


def call(invitation: _Invitation, rank: int) -> socket.socket | None:
    """A connection to who invites, on which this rank has said who it is; None where there is none."""
    hosts, port, asked, _ = invitation
    for host in hosts:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), _CONNECT_SECONDS)
            try:
                connection.sendall(_HELLO.pack(bytes.fromhex(asked), rank))
            except OSError:
                connection.close()
                raise
            return connection
    return None


def greeted(connection: socket.socket, invitation: _Invitation) -> bool:
    """Whether it is the right one who has answered; else the connection is closed."""
    with contextlib.suppress(OSError):
        connection.settimeout(_CONNECT_SECONDS)
        said = connection.recv(_SECRET_BYTES, socket.MSG_WAITALL)
        if secrets.compare_digest(said, bytes.fromhex(invitation[3])):
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
    """Addresses of this machine at which the others may reach it, the most likely first."""
    found = []
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface and sys.platform == "linux":
        found.append(_address_of(interface))
    near, elsewhere = _address_towards(store_address(store)), _address_towards((_ELSEWHERE, 9))
    # Who serves the store himself may know his name for one of the machine alone.
    found += [elsewhere, near] if near is not None and near.startswith("127.") else [near, elsewhere]
    return list(dict.fromkeys(address for address in found if address is not None))


def _address_of(interface: str) -> str | None:
    request = struct.pack("16s240x", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return socket.inet_ntoa(fcntl.ioctl(asking, _SIOCGIFADDR, request)[20:24])
    return None


def _address_towards(target: tuple[str, int] | None) -> str | None:
    """From which address this machine sends to `target`; nothing is sent."""
    if target is None:
        return None
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.connect(address)
            return str(asking.getsockname()[0])
    return None
