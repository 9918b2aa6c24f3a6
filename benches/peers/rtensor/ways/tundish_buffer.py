"""`tundish.rtensor` where nothing travels: the consumer makes tensors of what its buffer has, and reads them."""

from __future__ import annotations

from rtensor.ways import tundish_sockets

__all__ = ["Consumer", "Owner"]

Owner = tundish_sockets.Owner


class Consumer(tundish_sockets.Consumer):
    def forget(self, case: str) -> None:
        """It stays in the buffer."""
