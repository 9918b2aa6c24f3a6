"""`tundish.rtensor` on one node: tensors are read from shared memory."""

from __future__ import annotations

from rtensor.contestants import tundish_sockets

__all__ = ["Consumer", "Owner"]

Owner = tundish_sockets.Owner


class Consumer(tundish_sockets.Consumer):
    shared_memory = True
