"""`Server`: serves what this process stores, and lets a controller drain what it holds. Does not import torch.

Invariants:
    A process has one server.
    A token is sent only to addresses that this process was told of, never to any address that a handle names.
    A child made by `fork` starts with a new state: it serves nothing, is in no step, and has no tokens.
"""

from __future__ import annotations

import ipaddress
import logging
import operator
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.own_address import OUTSIDE, address_towards
from tundish.regular_files import read_regular_file

_log = logging.getLogger("tundish.rtensor")

_LOOPBACK = "127.0.0.1"
# Far more than any chain of certificates has.
_PEM_BYTES = 1 << 20

# Seconds, of calls that store or fetch.
DEFAULT_TIMEOUT: Final = 60.0


class Trust(NamedTuple):
    """How this process speaks to a server.

    Attributes:
        token: the token to send, or None.
        certificates: the certificates to trust (PEM); None speaks no TLS.
    """

    token: str | None = None
    certificates: bytes | None = None


@dataclass
class ProcessState:
    """The state of one process.

    Attributes:
        backend: the `Backend` of this process, if one was set or used.
        server: its `Server`, if it serves.
        claimant: identifies the claims of this process's own steps.
        last_step: the number of the last step that began here or on a controller here.
        in_step: whether a step of this process alone is under way.
        kept: ids of other processes' shards that this process keeps beyond the end of a step.
        trusted: the token to send and the certificates to trust, by address.
        step_check_due: when to check whether any step ever began (`time.monotonic`); None before the first fetch.
    """

    pid: int = field(default_factory=os.getpid)
    lock: threading.RLock = field(default_factory=threading.RLock)
    claimant: int = field(default_factory=lambda: secrets.randbits(63))
    # Their modules import this one.
    backend: Any = None
    server: Any = None
    last_step: int = 0
    in_step: bool = False
    kept: set[str] = field(default_factory=set)
    trusted: dict[str, Trust] = field(default_factory=dict)
    step_check_due: float | None = None


_state = ProcessState()


def state() -> ProcessState:
    """The state of this process."""
    global _state
    if _state.pid != os.getpid():
        _state = ProcessState()
    return _state


def next_step_number() -> int:
    """The number of a new step: the time in microseconds, so that steps of several controllers differ and grow."""
    mine = state()
    with mine.lock:
        mine.last_step = max(mine.last_step + 1, time.time_ns() // 1000)
        return mine.last_step


# The default of `token` in `trust`. No string, since callers may pass any.
_NOT_GIVEN: Final[Any] = object()

# Paths of the PEM files of a certificate and its private key.
_Tls = tuple[str | os.PathLike[str], str | os.PathLike[str]]


class _Options(NamedTuple):
    """The arguments that a server was started with."""

    host: str
    port: int
    token: str | None
    limit_bytes: int | None
    buffer_limit_bytes: int | None
    tls: _Tls | None
    open_metrics: bool


class Server:
    """The server of this process. A context manager that closes it.

    Attributes:
        addr: its address for other processes, `"host:port"`, as handles name it.
        token: the token that a request has to carry, or None.
        certificate: path of the PEM file with its certificate, or None without TLS.

    Example:
        >>> import tundish as td
        >>> with td.rtensor.serve() as server:
        ...     server.addr.partition(":")[0], server.token, server.certificate
        ('127.0.0.1', None, None)
    """

    def __init__(self, addr: str, native: _native.ShardServer, options: _Options) -> None:
        self.addr = addr
        self.token = options.token
        self.certificate = None if options.tls is None else options.tls[0]
        self._native = native
        self._options = options
        # Whether a call that stores or fetches started it, and nobody called `serve`.
        self._is_implicit = False

    def close(self) -> None:
        """Stop serving. Shards stay stored, and no other process can fetch them. Idempotent."""
        mine = state()
        with mine.lock:
            if mine.server is self:
                mine.server = None
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
    tls: _Tls | None = None,
    open_metrics: bool = False,
) -> Server:
    """Serve what this process stores. Call it once in every process that stores or fetches.

    Called again with the same arguments, it returns the same server.

    Args:
        host: the address to listen on. Any but a loopback address needs a token. `0.0.0.0` listens on all addresses
            of the machine; handles then name the one that leads outside.
        port: the port to listen on; 0 takes a free one.
        token: the token that every request has to carry. Without one, only processes of the same user on this machine
            are answered. Without `tls` it travels in the clear.
        limit_bytes: memory limit of stored shards, in bytes; by default a quarter of what the process can have.
        buffer_limit_bytes: memory limit of the fetch buffer, in bytes; the same default.
        peers: addresses of other processes to which this one sends the token, over TLS if it serves over TLS. `trust`
            adds more. A `Controller` adds its workers.
        tls: paths of two PEM files, the certificate and its private key. The server then speaks TLS. The first file may
            hold more certificates, such as that of the authority. This process trusts peers with one of these
            certificates, and peers whose certificate one of these signed.
        open_metrics: answer `/metrics` and `/health` to everybody who reaches the port.

    Returns:
        The server, which is closed by its `close()` or as a context manager.

    Raises:
        InvalidInputError: a token is missing, an argument is invalid, or this process serves with other arguments.
        InvalidTypeError: an argument has the wrong type.
        StorageError: the port is taken, or a file cannot be read (an `OSError` with its `errno`).

    Example:
        >>> import tundish as td
        >>> server = td.rtensor.serve()  # between nodes: serve("0.0.0.0", token=..., tls=(certificate, key))
        >>> server.close()
    """
    options = _Options(host, port, token, limit_bytes, buffer_limit_bytes, tls, open_metrics)
    _check_options(options)
    if isinstance(peers, str) or not isinstance(peers, Iterable):
        raise InvalidTypeError(f'peers is {peers!r}: give a list of addresses, "host:port"')
    others = list(peers)
    for addr in others:
        split_address(addr)
    mine = state()
    with mine.lock:
        if mine.server is None:
            mine.server = _start(options)
        elif mine.server._options != options:
            raise InvalidInputError(_already_serving(mine.server))
        server: Server = mine.server
        server._is_implicit = False
        trust(*others, token=token, tls=server.certificate)
        return server


def _start(options: _Options) -> Server:
    host, tls = options.host, options.tls
    native = _native.ShardServer(
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
    _native.ShardStore.set_limits(*(default if limit is None else limit for limit in limits))
    addr = f"{_reachable_host(host)}:{native.port}"
    _native.ShardStore.add_own_address(addr)
    return Server(addr, native, options)


def _already_serving(server: Server) -> str:
    if server._is_implicit:
        return (
            f"this process serves at {server.addr} with the default arguments already, since it called remotize, "
            "store or Controller.from_group before serve: call serve first"
        )
    return f"this process serves at {server.addr} already, with other arguments: close that server first"


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
        state().trusted[addr] = Trust(token, certificates)


def trust_workers(addresses: Iterable[str]) -> None:
    """Trust addresses as this process's own server is trusted, if `trust` was not called with them."""
    mine = state()
    if mine.server is not None and (mine.server.token or mine.server.certificate):
        unknown = [addr for addr in addresses if addr not in mine.trusted]
        trust(*unknown, token=mine.server.token, tls=mine.server.certificate)


def server_address() -> str:
    """The address of this process's server, which starts on loopback if there is none."""
    mine = state()
    with mine.lock:
        if mine.server is None:
            serve()._is_implicit = True
        addr: str = mine.server.addr
    return addr


def _check_options(options: _Options) -> None:
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


def _read_pem(path: str | os.PathLike[str], what: str) -> bytes:
    content: bytes = read_regular_file(path, f"a PEM file with {what}", _PEM_BYTES)
    return content


def _warn_of_tls(native: _native.ShardServer, tls: _Tls) -> None:
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
        return address_towards(OUTSIDE) or _LOOPBACK
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
