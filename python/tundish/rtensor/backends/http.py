"""`HttpBackend`: the default backend. Owners serve their tensors over HTTP and shared memory."""

from __future__ import annotations

from tundish.rtensor.backends.backend import Backend
from tundish.rtensor.server import server_address

__all__ = ["HttpBackend"]


class HttpBackend(Backend):
    """Tensors stay in the process that made them, which serves them over HTTP; on its node, through shared memory.

    Args:
        shared_memory: whether tensors of owners on the same node are read from their memory, not over a socket.

    Example:
        >>> import tundish as td
        >>> td.rtensor.set_backend(td.rtensor.HttpBackend(shared_memory=False))
        >>> td.rtensor.set_backend(None)
    """

    def __init__(self, *, shared_memory: bool = True) -> None:
        self.shared_memory = shared_memory

    def address(self) -> str:
        return server_address()
