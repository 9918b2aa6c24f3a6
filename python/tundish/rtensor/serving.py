"""A process's server: where others fetch what it stores, and drain what it holds.

What always holds: a process serves at one address; a port that others reach is not opened without a token; the
token is sent to those alone of whom this process was told.
"""

from __future__ import annotations

import ipaddress
import operator
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.rtensor.checks import check_token, split_address
from tundish.rtensor.process import state

__all__ = ["Server", "address", "serve", "trust"]

_LOOPBACK = "127.0.0.1"
# A documentation address (RFC 5737): to ask which of this machine's addresses leads outside takes one, and sends
# nothing.
_ELSEWHERE = "192.0.2.1", 9


class Server:
    """Serves what this process stores, until it is closed or the process ends. A context manager.

    Attributes:
        addr: `"host:port"`, as others reach it, and as handles name it.
        token: what has to be shown to it, or None.
    """

    def __init__(
        self, addr: str, token: str | None, native: _native.ShardServer, options: tuple[object, ...]
    ) -> None:
        self.addr = addr
        self.token = token
        self._native = native
        self._options = options

    def close(self) -> None:
        """Serve no longer. What is stored stays, and nobody else gets at it. Done twice is done once."""
        mine = state()
        with mine.lock:
            if mine.server is self:
                mine.server = None
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server at {self.addr}>"


def serve(
    host: str = _LOOPBACK,
    port: int = 0,
    token: str | None = None,
    limit_bytes: int | None = None,
    *,
    buffer_limit_bytes: int | None = None,
    peers: Iterable[str] = (),
) -> Server:
    """Serve what this process stores; every process that stores or fetches does so once.

    Args:
        host: the address to listen at. Any but that of the machine itself (`127.0.0.1`) is reached by others and
            wants a token. `0.0.0.0` is all of the machine's; handles then name the one that leads outside.
        port: 0 takes one that is free.
        token: whoever wants anything has to show it. There is no TLS: where others listen on the network, go
            through a tunnel, as the guide has it.
        limit_bytes: the most memory for what is stored; by default a quarter of what the process can have.
        buffer_limit_bytes: the most for what is fetched, likewise.
        peers: addresses of processes that are shown the same token. Those that are known later are added with `trust`.

    Called again with the same arguments it returns the same server.

    Raises `InvalidInputError` without a token where one is needed, or where this process serves otherwise already;
    `StorageError`, an `OSError` with its `errno`, where the port is taken.
    """
    options = (host, port, token, limit_bytes, buffer_limit_bytes)
    _check(host, port, token, limit_bytes, buffer_limit_bytes)
    others = _addresses(peers)
    mine = state()
    with mine.lock:
        if mine.server is None:
            default = 4 * _native.default_arena_limit()
            native = _native.ShardServer(host.removeprefix("[").removesuffix("]"), port, token)
            # Where nothing is served the limits are as they were.
            _native.ShardStore.set_limits(
                default if limit_bytes is None else limit_bytes,
                default if buffer_limit_bytes is None else buffer_limit_bytes,
            )
            addr = f"{_shown(host)}:{native.port}"
            _native.ShardStore.announce(addr)
            mine.server = Server(addr, token, native, options)
        elif mine.server._options != options:
            raise InvalidInputError(
                f"this process serves at {mine.server.addr} already, with other arguments: a process serves once; "
                "close that server first"
            )
        trust(*others, token=token)
        return mine.server


def trust(*addresses: str, token: str | None) -> None:
    """Show `token` to the processes that serve at these addresses; to others none is shown.

    Raises `InvalidInputError` for what is no address, and for what is no token.
    """
    check_token(token)
    for one in addresses:
        split_address(one)
    tokens = state().tokens
    for one in addresses:
        _native.trust_owner(one, token)
        if token is None:
            tokens.pop(one, None)
        else:
            tokens[one] = token


def address() -> str:
    """Where this process serves; on the machine itself, if nobody said otherwise."""
    server = state().server
    return serve().addr if server is None else server.addr


def _check(host: str, port: int, token: str | None, *limits: int | None) -> None:
    if not isinstance(host, str) or not host:
        raise InvalidTypeError(f"host is {host!r}, not a name or an address")
    if not _is_between(port, 0, 2**16 - 1):
        raise InvalidInputError(f"port is {port!r}, not 0 to 65535")
    check_token(token)
    for limit in limits:
        if limit is not None and not _is_between(limit, 1, 2**63 - 1):
            raise InvalidInputError(f"a limit is {limit!r}, not a number of bytes above 0 and below 2**63")
    if token is None and not _is_this_machine(host):
        raise InvalidInputError(
            f"{host} is reached from other machines, so a token is needed: serve({host!r}, token=…), the same for all "
            "processes of the job"
        )


def _is_between(value: Any, least: int, most: int) -> bool:
    """Whether it is a whole number, also one of numpy, and in these bounds."""
    try:
        return not isinstance(value, bool) and least <= operator.index(value) <= most
    except TypeError:
        return False


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _shown(host: str) -> str:
    """The host as others reach it."""
    try:
        numbers = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    if numbers.is_unspecified:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(_ELSEWHERE)
            except OSError:
                # A machine without a way outside.
                return _LOOPBACK
            return str(probe.getsockname()[0])
    return f"[{numbers}]" if numbers.version == 6 else str(numbers)


def _addresses(peers: Iterable[str]) -> list[str]:
    if isinstance(peers, str) or not isinstance(peers, Iterable):
        raise InvalidTypeError(f"peers is {peers!r}, not a list of addresses")
    found = list(peers)
    for one in found:
        split_address(one)
    return found
