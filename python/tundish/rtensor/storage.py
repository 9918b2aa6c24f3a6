"""Shards that this process stores, by name: `store`, `fetch`, `remove`, `clear_node`, `storage_stats`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tundish._native import RTensor
from tundish.errors import InvalidTypeError, format_type
from tundish.rtensor.arguments import DEFAULT_TIMEOUT, check_shard_ids
from tundish.rtensor.backends.backend import Removed
from tundish.rtensor.backends.current_backend import current_backend
from tundish.rtensor.dense_tensors import dense
from tundish.timeouts import check_seconds
from tundish.tree import Refusal

__all__ = ["clear_node", "fetch", "remove", "storage_stats", "store"]


def store(shard_id: str, tensor: Tensor, *, timeout: float = DEFAULT_TIMEOUT) -> RTensor:
    """Store a copy of `tensor` under a name, and return its handle.

    Do not reuse a name within a step: see `remove`.

    Args:
        shard_id: the name: up to 128 characters out of `A-Z a-z 0-9 . _ : -`.
        tensor: a dense tensor on any device.
        timeout: seconds to wait for memory while the storage is at its limit.

    Returns:
        The handle of the stored copy.

    Raises:
        InvalidInputError: a shard of that name exists.
        TensorStoreFullError, InvalidTypeError: as `remotize`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> handle = td.rtensor.store("rewards", torch.ones(2))
        >>> td.rtensor.localize(handle)
        tensor([1., 1.])
    """
    timeout = check_seconds(timeout)
    _check_shard_id(shard_id)
    if not isinstance(tensor, Tensor):
        raise InvalidTypeError(
            f"tensor is {format_type(tensor)}: give a tensor; remotize takes containers of tensors"
        )
    try:
        values = dense(tensor)
    except Refusal as refusal:
        raise refusal.kind(f"the tensor to be stored as {shard_id} {refusal.reason}") from refusal
    return current_backend().store_as(shard_id, values, timeout)


def fetch(shard_id: str) -> Tensor:
    """Return the tensor that this process stores under a name, in host memory. You may write to it.

    Args:
        shard_id: the name.

    Returns:
        A CPU tensor.

    Raises:
        ShardGoneError: this process stores no tensor under this name.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> handle = td.rtensor.store("rewards", torch.ones(2))
        >>> td.rtensor.fetch("rewards")
        tensor([1., 1.])
    """
    _check_shard_id(shard_id)
    found: Tensor = current_backend().handle_of(shard_id).to_local()
    return found


def remove(shard_ids: str | Iterable[str]) -> int:
    """Remove shards that this process stores, and what it fetched of them.

    Other processes keep what they fetched until their step ends or `clear_batches` drains it. Until then they read the
    old tensor, even through a handle of a new tensor with the same name.

    Args:
        shard_ids: one name, or names. Unknown and repeated names are ignored.

    Returns:
        The number of shards that were removed.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> handle = td.rtensor.store("rewards", torch.ones(2))
        >>> td.rtensor.remove(["rewards", "unknown"])
        1
    """
    names: Sequence[str] | Iterable[str] = [shard_ids] if isinstance(shard_ids, str) else shard_ids
    check_shard_ids(names, "remove")
    return current_backend().remove(names)["cleared_count"]


def clear_node() -> Removed:
    """Remove everything that this process stores or fetched, claimed or not.

    Returns:
        The counts of the storage: `cleared_count` shards, `num_tensors` and `total_bytes`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> handle = td.rtensor.store("rewards", torch.ones(2))
        >>> td.rtensor.clear_node()["cleared_count"]
        1
    """
    return current_backend().clear()


def storage_stats() -> dict[str, Any]:
    """Counts of the shards that this process stores.

    Returns:
        A dict with these counts:

        - `num_tensors`, `total_bytes`: all stored tensors.
        - `unclaimed_entries`, `unclaimed_bytes`: those that no step claims; `oldest_unclaimed_seconds` is the age of
          the oldest.
        - `high_water_bytes`: the largest `total_bytes` so far.
        - `memory`: bytes of allocated memory. `limit_bytes`; `used_bytes`; `idle_bytes`, kept for the next tensors;
          `escaped_bytes`, of removed tensors that are still in use.

    Example:
        >>> import tundish as td
        >>> td.rtensor.storage_stats()["num_tensors"]
        0
    """
    storage = current_backend().stats()["storage"]
    return {"num_tensors": storage.pop("num_entries"), **storage}


def _check_shard_id(shard_id: str) -> None:
    if not isinstance(shard_id, str):
        raise InvalidTypeError(f"shard_id is {format_type(shard_id)}: give the name of a shard, a string")
