"""`Backend`: stores tensors in this process's `ShardStore` and fetches through its buffer; and `set_backend`.

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
from tundish.errors import InvalidTypeError
from tundish.rtensor.dense_tensors import tensors_over
from tundish.rtensor.process_state import state

__all__ = ["Backend", "Removed", "set_backend"]


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
    """

    shared_memory = True

    @abstractmethod
    def address(self) -> str:
        """The owner's address in handles of this process's shards."""

    def store(self, tensors: Sequence[Tensor], timeout: float) -> list[RTensor]:
        """Stores copies of dense CPU tensors, all of them or none; returns their handles."""
        return ShardStore.put(list(tensors), self.address(), timeout)

    def store_as(self, shard_id: str, tensor: Tensor, timeout: float) -> RTensor:
        """Stores a copy of one dense CPU tensor under a name."""
        return ShardStore.put_as(shard_id, tensor, self.address(), timeout)

    def handle_of(self, shard_id: str) -> RTensor:
        """The handle of a shard that this process stores."""
        return ShardStore.handle_of(shard_id, self.address())

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> list[Tensor]:
        """The tensors of handles, in their order, which the caller may write to. No two handles are equal."""
        return tensors_over(ShardStore.fetch(list(handles), timeout, self.shared_memory), handles)

    def remove(self, shard_ids: Iterable[str]) -> Removed:
        """Removes shards that this process stores, and their fetched copies."""
        return _removed(ShardStore.remove(shard_ids))

    def clear(self) -> Removed:
        """Removes all stored and fetched shards of this process."""
        return _removed(ShardStore.clear())

    def stats(self) -> dict[str, Any]:
        """`storage`, `buffer` and `steps` of this process."""
        found: dict[str, Any] = json.loads(ShardStore.stats())
        return found


def _removed(counts: tuple[int, int, int]) -> Removed:
    cleared, tensors, total = counts
    return {"cleared_count": cleared, "num_tensors": tensors, "total_bytes": total}


def set_backend(backend: Backend | None) -> None:
    """Sets the backend of this process. Shards that are stored stay where they are.

    Args:
        backend: `HttpBackend()`, `LocalBackend()` or `RayBackend()`. None is the default, `HttpBackend()`.

    Raises:
        InvalidTypeError: it is no backend, or a class instead of an instance.
    """
    given: Any = backend
    if given is not None and not isinstance(given, Backend):
        shown = given.__qualname__ if isinstance(given, type) else type(given).__qualname__
        raise InvalidTypeError(f"set_backend takes a backend, such as HttpBackend(), not {shown}")
    state().backend = backend
