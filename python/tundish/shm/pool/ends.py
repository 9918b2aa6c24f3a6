"""Ends of lines that only the parent of a pool may hold: where the parent dies, its workers see them close.

Owns the list of these ends in this process. What always holds: a child made by `fork`, of whatever making, closes its
copies before anything else runs in it; programs that are started do not inherit them (they are close-on-exec).
"""

from __future__ import annotations

import os
import socket
import weakref

__all__ = ["Line"]

_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for end in list(_ends):
        end.close()
    _ends.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Line:
    """A pair of connected sockets: `parent` of this process alone, `child` for others to inherit."""

    def __init__(self, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> None:
        self.parent, self.child = socket.socketpair(socket.AF_UNIX, kind)
        _ends.add(self.parent)

    def close(self) -> None:
        self.parent.close()
        self.child.close()
