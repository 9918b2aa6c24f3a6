"""Where tensors lie, and how they are fetched: backends behind one protocol.

Owns the choice of the backend and the two that need nothing else: over HTTP and shared memory, and within one
process. What always holds: whatever carries the bytes, what a process stores is known to its `ShardStore`, and what
it fetched is in that one's buffer, so that every drain and limit holds for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypedDict, runtime_checkable

from torch import Tensor

from tundish._native import RTensor, ShardStore, ShardView
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.rtensor.process import state
from tundish.rtensor.serving import address

__all__ = ["Backend", "HttpBackend", "LocalBackend", "Removed", "StoreBackend", "backend", "set_backend"]

_LOCAL = "local"


class Removed(TypedDict):
    """What a removal removed."""

    cleared_count: int
    num_tensors: int
    total_bytes: int


@runtime_checkable
class Backend(Protocol):
    """Stores tensors, and fetches them. Each method is called by several threads at once."""

    def store(self, tensors: Sequence[Tensor], timeout: float) -> list[RTensor]:
        """Keep copies of these dense tensors in host memory, all of them or none; handles of them."""

    def store_as(self, shard_id: str, tensor: Tensor, timeout: float) -> RTensor:
        """As `store`, of one, under a name."""

    def own(self, shard_id: str) -> RTensor:
        """The handle of a shard that this process stores."""

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> Sequence[ShardView]:
        """The bytes of these handles, which are all different, in order: from the buffer, or fetched into it."""

    def fetch_into(self, handles: Sequence[RTensor], targets: Sequence[Tensor], timeout: float) -> None:
        """As `fetch`, into dense tensors in host memory; nothing is kept."""

    def remove(self, shard_ids: Iterable[str]) -> Removed:
        """Remove what this process stores under these names, and what it fetched of it."""

    def clear(self) -> Removed:
        """Remove all that this process stores and fetched."""

    def clear_buffer(self, shard_ids: Iterable[str] | None) -> int:
        """Drop what was fetched of these shards, or all of it; how many entries."""

    def stats(self) -> dict[str, Any]:
        """`storage`, `buffer` and `epochs` of this process."""


class StoreBackend:
    """What is the same wherever the bytes are.

    `shared_memory`: whether those of owners on this node are read where they lie.
    """

    shared_memory = True

    def address(self) -> str:
        """What handles of this process's shards name as their owner."""
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


class HttpBackend(StoreBackend):
    """Tensors lie with the process that made them, which serves them: over HTTP, on its node through shared memory.

    `shared_memory=False` has them come over sockets there, too.
    """

    def __init__(self, *, shared_memory: bool = True) -> None:
        self.shared_memory = shared_memory

    def address(self) -> str:
        return address()


class LocalBackend(StoreBackend):
    """Tensors lie in this process, and no other gets at them: for jobs of one process, and for tests."""

    def __init__(self) -> None:
        ShardStore.announce(_LOCAL)

    def address(self) -> str:
        return _LOCAL

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> Sequence[ShardView]:
        _only_local(handles)
        return super().fetch(handles, timeout)

    def fetch_into(self, handles: Sequence[RTensor], targets: Sequence[Tensor], timeout: float) -> None:
        _only_local(handles)
        super().fetch_into(handles, targets, timeout)


def _only_local(handles: Sequence[RTensor]) -> None:
    for handle in handles:
        if handle.node_addr != _LOCAL:
            raise InvalidInputError(
                f"{handle} is served over the network, and LocalBackend knows this process alone: use HttpBackend"
            )


def _removed(counts: tuple[int, int, int]) -> Removed:
    cleared, tensors, total = counts
    return {"cleared_count": cleared, "num_tensors": tensors, "total_bytes": total}


def backend() -> Backend:
    """The backend of this process: the one that was set, or an `HttpBackend`."""
    mine = state()
    if mine.backend is None:
        mine.backend = HttpBackend()
    return mine.backend


def set_backend(chosen: Backend | None) -> None:
    """Use `chosen` from here on: `HttpBackend()`, `LocalBackend()`, `RayBackend()` or what has their methods.

    None: the default, over HTTP. Every process chooses for itself. What is stored stays where it is.
    """
    if chosen is not None and (isinstance(chosen, type) or not isinstance(chosen, Backend)):
        shown = chosen.__qualname__ if isinstance(chosen, type) else type(chosen).__qualname__
        raise InvalidTypeError(f"set_backend takes a backend, such as HttpBackend(), not {shown}")
    state().backend = chosen
