"""`StoreBackend`: what all backends share, on top of the process's `ShardStore`.

Invariants:
    The `ShardStore` knows every shard, and every fetch goes through its buffer, whatever sends the bytes: so all drains
    and limits apply.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tundish._native import RTensor, ShardStore, ShardView
from tundish.rtensor.backends.backend import Removed

__all__ = ["StoreBackend"]


class StoreBackend:
    """Stores in this process's `ShardStore`, and fetches through its buffer.

    Attributes:
        shared_memory: whether shards of owners on this node are read from the owner's shared memory.
    """

    shared_memory = True

    def address(self) -> str:
        """The owner's address in handles of this process's shards."""
        raise NotImplementedError

    def store(self, tensors: Sequence[Tensor], timeout: float) -> list[RTensor]:
        return ShardStore.put(list(tensors), self.address(), timeout)

    def store_as(self, shard_id: str, tensor: Tensor, timeout: float) -> RTensor:
        return ShardStore.put_as(shard_id, tensor, self.address(), timeout)

    def own(self, shard_id: str) -> RTensor:
        return ShardStore.handle_of(shard_id, self.address())

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> Sequence[ShardView]:
        return ShardStore.fetch(list(handles), timeout, self.shared_memory)

    def fetch_into(self, handles: Sequence[RTensor], targets: Sequence[Tensor], timeout: float) -> None:
        ShardStore.fetch_into(list(handles), list(targets), timeout, self.shared_memory)

    def remove(self, shard_ids: Iterable[str]) -> Removed:
        return _removed(ShardStore.remove(shard_ids))

    def clear(self) -> Removed:
        return _removed(ShardStore.clear())

    def clear_buffer(self, shard_ids: Iterable[str] | None) -> int:
        return ShardStore.clear_buffer(shard_ids)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(ShardStore.stats())
        return found


def _removed(counts: tuple[int, int, int]) -> Removed:
    cleared, tensors, total = counts
    return {"cleared_count": cleared, "num_tensors": tensors, "total_bytes": total}
