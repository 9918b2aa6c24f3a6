"""`tundish.rtensor` on one node: tensors are read where they lie."""

from __future__ import annotations

from rtensor.ways import tundish_sockets

__all__ = ["Consumer", "Owner"]

Owner = tundish_sockets.Owner


class Consumer(tundish_sockets.Consumer):
    shared_memory = True
