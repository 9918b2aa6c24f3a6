"""`Server`: serves what a store holds, and lets a controller drain it. Does not import torch.

Invariants:
    A token is sent only to addresses that this process was told of, never to any address that a handle names.
    A child made by `fork` has no tokens.
"""

from __future__ import annotations

import ipaddress
import logging
import operator
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.own_address import OUTSIDE, address_towards
from tundish.regular_files import read_regular_file

_log = logging.getLogger("tundish.rtensor")

LOOPBACK: Final = "127.0.0.1"
# Far more than any chain of certificates has.
_PEM_BYTES = 1 << 20


class Trust(NamedTuple):
    """How this process speaks to a server.

    Attributes:
        token: the token to send, or None.
        certificates: the certificates to trust (PEM); None speaks no TLS.
    """

    token: str | None = None
    certificates: bytes | None = None


# By address. A child made by `fork` trusts none.
trusted: Final[dict[str, Trust]] = {}
os.register_at_fork(after_in_child=trusted.clear)

# The default of `token` in `trust`. No string, since callers may pass any.
_NOT_GIVEN: Final[Any] = object()

# Paths of the PEM files of a certificate and its private key.
Tls = tuple[str | os.PathLike[str], str | os.PathLike[str]]


class ServerOptions(NamedTuple):
    """The arguments of `serve`, but for `peers`."""

    host: str
    port: int
    token: str | None
    limit_bytes: int | None
    buffer_limit_bytes: int | None
    tls: Tls | None
    open_metrics: bool


class Server:
    """The server of a store. A context manager that closes it.

    Attributes:
        addr: its address for other processes, `"host:port"`, as handles name it.
        token: the token that a request has to carry, or None.
        certificate: path of the PEM file with its certificate, or None without TLS.
        options: the arguments that it was started with.
        is_closed: whether it was closed.

    Example:
        >>> import tundish as td
        >>> with td.rtensor.serve() as server:
        ...     server.addr.partition(":")[0], server.token, server.certificate
        ('127.0.0.1', None, None)
    """

    def __init__(self, addr: str, native: _native.ShardServer, options: ServerOptions) -> None:
        self.addr = addr
        self.token = options.token
        self.certificate = None if options.tls is None else options.tls[0]
        self.options = options
        self.is_closed = False
        self._native = native

    def close(self) -> None:
        """Stop serving. Shards stay stored, and no other process can fetch them. Idempotent."""
        self.is_closed = True
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server at {self.addr}>"


def start_server(shards: _native.ShardStore, options: ServerOptions) -> Server:
    """Start a server of `shards`, and set their limits."""
    host, tls = options.host, options.tls
    native = _native.ShardServer(
        shards,
        host.removeprefix("[").removesuffix("]"),
        options.port,
        options.token,
        tls=None if tls is None else (_read_pem(tls[0], "certificates"), _read_pem(tls[1], "a private key")),
        open_metrics=options.open_metrics,
    )
    if tls is not None:
        _warn_of_tls(native, tls)
    # After the server started: a failure leaves the limits as they were.
    default = 4 * _native.default_arena_limit()
    limits = (options.limit_bytes, options.buffer_limit_bytes)
    shards.set_limits(*(default if limit is None else limit for limit in limits))
    addr = f"{_reachable_host(host)}:{native.port}"
    shards.add_own_address(addr)
    _log.info(
        "serving tensors at %s %s, %s",
        addr,
        "over TLS" if tls else "without TLS",
        "to clients with the token" if options.token else "to this user's processes on this machine",
    )
    return Server(addr, native, options)


def already_serving(server: Server, *, is_implicit: bool) -> str:
    """Why a store cannot serve with other arguments than `server`, which a call began if `is_implicit`."""
    if is_implicit:
        return (
            f"this store serves at {server.addr} with the default arguments already, since remotize, store or "
            "Controller.from_group was called before serve: call serve first"
        )
    return f"this store serves at {server.addr} already, with other arguments: close that server first"


def trust(*addresses: str, token: str | None = _NOT_GIVEN, tls: str | os.PathLike[str] | None = None) -> None:
    """Send `token` with every request to these addresses, over TLS with `tls`; other addresses get no token.

    Args:
        addresses: `"host:port"` of other processes' servers.
        token: their token; None forgets it.
        tls: path of a PEM file with the servers' certificates, or with that of the authority that signed them. Requests
            to these addresses then use TLS, and only servers with such a certificate get them. None: no TLS.

    Raises:
        InvalidTypeError: `token` is missing.
        InvalidInputError: an address or the token is invalid, or the file has no certificate.
        StorageError: the file cannot be read.

    Example:
        >>> import tundish as td
        >>> td.rtensor.trust("10.0.0.2:7000", "10.0.0.3:7000", token="secret")
        >>> td.rtensor.trust("10.0.0.2:7000", "10.0.0.3:7000", token=None)
    """
    if token is _NOT_GIVEN:
        raise InvalidTypeError("trust needs token=: give the servers' token, or token=None to forget it")
    check_token(token)
    for addr in addresses:
        split_address(addr)
    certificates = None if tls is None else _read_pem(tls, "certificates")
    for addr in addresses:
        _native.trust_owner(addr, token, tls=certificates)
        trusted[addr] = Trust(token, certificates)


def trust_workers(server: Server | None, addresses: Iterable[str]) -> None:
    """Trust addresses as `server`, if `trust` was not called with them."""
    if server is not None and (server.token or server.certificate):
        unknown = [addr for addr in addresses if addr not in trusted]
        trust(*unknown, token=server.token, tls=server.certificate)


def check_options(options: ServerOptions, peers: Iterable[str]) -> None:
    """Raise `InvalidInputError` or `InvalidTypeError` for invalid arguments of `serve`."""
    host = options.host
    if not isinstance(host, str) or not host:
        raise InvalidTypeError(f"host is {host!r}: give the name or the address to listen on")
    if not _is_integer(options.port, 0, 2**16 - 1):
        raise InvalidInputError(f"port is {options.port!r}: give 0 to 65535")
    check_token(options.token)
    tls: Any = options.tls
    is_pair = isinstance(tls, (tuple, list)) and len(tls) == 2
    if tls is not None and not (is_pair and all(isinstance(path, (str, os.PathLike)) for path in tls)):
        raise InvalidTypeError(f"tls is {tls!r}: give the paths of two PEM files, (certificate, key)")
    limits = {"limit_bytes": options.limit_bytes, "buffer_limit_bytes": options.buffer_limit_bytes}
    for name, limit in limits.items():
        if limit is not None and not _is_integer(limit, 1, 2**63 - 1):
            raise InvalidInputError(
                f"{name} is {limit!r}: give a number of bytes, at least 1 and below 2**63"
            )
    if isinstance(peers, str) or not isinstance(peers, Iterable):
        raise InvalidTypeError(f'peers is {peers!r}: give a list of addresses, "host:port"')
    for addr in peers:
        split_address(addr)


def _read_pem(path: str | os.PathLike[str], what: str) -> bytes:
    content: bytes = read_regular_file(path, f"a PEM file with {what}", _PEM_BYTES)
    return content


def _warn_of_tls(native: _native.ShardServer, tls: Tls) -> None:
    """Warn of a certificate that clients refuse, and of a key that is no secret."""
    certificate, key = os.fspath(tls[0]), os.fspath(tls[1])
    if native.certificate_problem is not None:
        _log.warning(
            "the server's certificate in %s is not valid now (%s): clients that trust its authority refuse it",
            certificate,
            native.certificate_problem,
        )
    if Path(key).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        _log.warning("other users may read the server's private key in %s: run `chmod 600 %s`", key, key)


def _is_integer(value: Any, least: int, most: int) -> bool:
    """Whether `value` is an integer, of numpy too, within these bounds."""
    try:
        return not isinstance(value, bool) and least <= operator.index(value) <= most
    except TypeError:
        return False


def _reachable_host(host: str) -> str:
    """The host under which other processes reach this one."""
    try:
        numbers = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    if numbers.is_unspecified:
        return address_towards(OUTSIDE) or LOOPBACK
    return f"[{numbers}]" if numbers.version == 6 else str(numbers)


def split_address(addr: str) -> tuple[str, int]:
    """Split `host:port`. Raise `InvalidInputError`."""
    host, colon, port = addr.rpartition(":") if isinstance(addr, str) else ("", "", "")
    is_name = host.isprintable() and " " not in host and "/" not in host
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 2**16
    if not host or not colon or not is_name or not is_port:
        raise InvalidInputError(f'{addr!r} is not the address of a process: give "host:port"')
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_token(token: Any) -> None:
    """Raise `InvalidInputError` for anything but a token or None."""
    if token is None:
        return
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise InvalidInputError(
            "token is not a string of printable ASCII characters: give one, for example of `openssl rand -hex 32`"
        )
    if not token or " " in token or len(token) > 1024:
        raise InvalidInputError(
            "token is empty, has spaces or is too long: give 1 to 1024 characters without spaces"
        )
