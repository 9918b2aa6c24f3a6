"""Checks of arguments that several functions of rtensor take. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tundish.errors import InvalidInputError, InvalidTypeError, format_type

__all__ = [
    "DEFAULT_TIMEOUT",
    "check_owners",
    "check_shard_ids",
    "check_token",
    "split_address",
]

# Seconds.
DEFAULT_TIMEOUT: Final = 60.0


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


def check_shard_ids(shard_ids: Any, function: str) -> None:
    """Raise `InvalidTypeError` for anything but an iterable of shard ids, such as a handle or a dict of handles."""
    if not isinstance(shard_ids, Iterable) or isinstance(shard_ids, (bytes, Mapping)):
        raise InvalidTypeError(
            f"{function} takes shard ids, not {format_type(shard_ids)}: give flatten_shard_ids(obj) for the handles in "
            "obj"
        )


def check_owners(addresses: Iterable[str]) -> None:
    """Raise `InvalidInputError` for owners that no controller reaches."""
    for addr in addresses:
        if addr == "local":
            raise InvalidInputError(
                "LocalBackend made one of these handles: only its own process can drain the shard, with "
                "rtensor.step() or rtensor.drain()"
            )
        split_address(addr)
