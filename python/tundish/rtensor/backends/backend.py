"""`Backend`: stores tensors in this process's `ShardStore` and fetches through its buffer.

Invariants:
    The `ShardStore` knows every shard, so that claims and drains reach it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from torch import Tensor

from tundish._native import RTensor, ShardStore
from tundish.rtensor.dense_tensors import tensors_over

__all__ = ["Backend", "Removed"]


class Removed(TypedDict):
    """The counts of a removal: shards that were removed, their tensors (one each) and bytes."""

    cleared_count: int
    num_tensors: int
    total_bytes: int


class Backend(ABC):
    """The base class of backends: stores tensors in this process and fetches those of others.

    A subclass defines `address`, and may override any other method. Several threads may call each method at once.

    Attributes:
        shared_memory: whether shards of owners on this node are read from the owner's shared memory.

    Example:
        >>> import tundish as td
        >>> class ForwardedBackend(td.rtensor.HttpBackend):
        ...     def address(self):
        ...         return "gateway:7000"  # forwards to the server of this process
        >>> td.rtensor.set_backend(ForwardedBackend())
        >>> td.rtensor.set_backend(None)
    """

    shared_memory = True

    @abstractmethod
    def address(self) -> str:
        """Return the owner's address in handles of this process's shards.

        Returns:
            The address, `"host:port"`.
        """

    def store(self, tensors: Sequence[Tensor], timeout: float) -> list[RTensor]:
        """Store copies of tensors, all of them or none.

        Args:
            tensors: dense CPU tensors.
            timeout: seconds to wait for memory.

        Returns:
            The handle of each tensor.
        """
        return ShardStore.put(list(tensors), self.address(), timeout)

    def store_as(self, shard_id: str, tensor: Tensor, timeout: float) -> RTensor:
        """Store a copy of one tensor under a name.

        Args:
            shard_id: the name.
            tensor: a dense CPU tensor.
            timeout: seconds to wait for memory.

        Returns:
            The handle.
        """
        return ShardStore.put_as(shard_id, tensor, self.address(), timeout)

    def handle_of(self, shard_id: str) -> RTensor:
        """Return the handle of a shard that this process stores.

        Args:
            shard_id: the name of the shard.

        Returns:
            The handle.
        """
        return ShardStore.handle_of(shard_id, self.address())

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> list[Tensor]:
        """Fetch the tensors of handles.

        Args:
            handles: the handles; no two are equal.
            timeout: seconds until everything has arrived.

        Returns:
            CPU tensors in the order of the handles, which the caller may write to.
        """
        return tensors_over(ShardStore.fetch(list(handles), timeout, self.shared_memory), handles)

    def remove(self, shard_ids: Iterable[str]) -> Removed:
        """Remove shards that this process stores, and their fetched copies.

        Args:
            shard_ids: the names of the shards.

        Returns:
            The counts of what was removed.
        """
        return _removed(ShardStore.remove(shard_ids))

    def clear(self) -> Removed:
        """Remove all stored and fetched shards of this process.

        Returns:
            The counts of what was removed.
        """
        return _removed(ShardStore.clear())

    def stats(self) -> dict[str, Any]:
        """Count what this process stores and has fetched.

        Returns:
            `storage`, `buffer` and `steps`.
        """
        found: dict[str, Any] = json.loads(ShardStore.stats())
        return found


def _removed(counts: tuple[int, int, int]) -> Removed:
    cleared, tensors, total = counts
    return {"cleared_count": cleared, "num_tensors": tensors, "total_bytes": total}
