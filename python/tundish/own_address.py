"""The address from which this machine sends to others."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

# An address that no machine has (RFC 5737), for the address from which this machine sends to other machines.
OUTSIDE: Final = "192.0.2.1", 9


def address_towards(target: tuple[str, int]) -> str | None:
    """The address from which this machine sends to a host and port. Nothing is sent.

    Returns:
        The address; None if this machine has no route to the target.
    """
    # Connecting a datagram socket only chooses the route.
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None
