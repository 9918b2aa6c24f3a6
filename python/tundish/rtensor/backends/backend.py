"""`Backend`: the protocol of a backend; and the one that a process uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypedDict, runtime_checkable

from torch import Tensor

from tundish._native import RTensor, ShardView
from tundish.errors import InvalidTypeError
from tundish.rtensor.process import state

__all__ = ["Backend", "Removed", "set_backend"]


class Removed(TypedDict):
    """The counts of a removal: shards that were removed, their tensors (one each) and bytes."""

    cleared_count: int
    num_tensors: int
    total_bytes: int


@runtime_checkable
class Backend(Protocol):
    """Stores tensors and fetches them. Several threads call each method at once."""

    def store(self, tensors: Sequence[Tensor], timeout: float) -> list[RTensor]:
        """Stores copies of dense CPU tensors, all of them or none; returns their handles."""

    def store_as(self, shard_id: str, tensor: Tensor, timeout: float) -> RTensor:
        """Stores a copy of one dense CPU tensor under a name."""

    def own(self, shard_id: str) -> RTensor:
        """The handle of a shard that this process stores."""

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> Sequence[ShardView]:
        """The bytes of handles, in their order: from the fetch buffer, or fetched into it. No two are equal."""

    def fetch_into(self, handles: Sequence[RTensor], targets: Sequence[Tensor], timeout: float) -> None:
        """Fetches into dense CPU tensors; the fetch buffer keeps nothing."""

    def remove(self, shard_ids: Iterable[str]) -> Removed:
        """Removes shards that this process stores, and what it fetched of them."""

    def clear(self) -> Removed:
        """Removes all that this process stores and fetched."""

    def clear_buffer(self, shard_ids: Iterable[str] | None) -> int:
        """Drops what was fetched of these shards, or everything; returns the number of entries."""

    def stats(self) -> dict[str, Any]:
        """`storage`, `buffer` and `epochs` of this process."""


def set_backend(backend: Backend | None) -> None:
    """Sets the backend of this process. Shards that are stored stay where they are.

    Args:
        backend: `HttpBackend()`, `LocalBackend()`, `RayBackend()` or an object with their methods. None is the
            default, `HttpBackend()`.

    Raises:
        InvalidTypeError: it is no backend, or a class instead of an instance.
    """
    if backend is not None and (isinstance(backend, type) or not isinstance(backend, Backend)):
        shown = backend.__qualname__ if isinstance(backend, type) else type(backend).__qualname__
        raise InvalidTypeError(f"set_backend takes a backend, such as HttpBackend(), not {shown}")
    state().backend = backend
