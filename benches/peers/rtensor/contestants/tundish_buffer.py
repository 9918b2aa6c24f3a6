"""`tundish.rtensor` without a transfer: the consumer makes tensors of its buffer, and reads them."""

from __future__ import annotations

from rtensor.contestants import tundish_sockets

__all__ = ["Consumer", "Owner"]

Owner = tundish_sockets.Owner


class Consumer(tundish_sockets.Consumer):
    def forget(self, case: str) -> None:
        """Keeps it in the buffer."""
