"""From tensors to handles: what a process keeps for others.

What always holds: a tensor is stored once a call, however often it is named; nothing of it is changed, and nothing
that is changed of it later changes what was stored.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from tundish._native import RTensor
from tundish.errors import InvalidTypeError
from tundish.rtensor.backends import Removed, backend
from tundish.rtensor.checks import check_iterator, check_names, check_seconds
from tundish.rtensor.handle import CLOSED, inside, opened
from tundish.rtensor.memory import STORED_DTYPES, dense, is_whole
from tundish.tree import Refusal, find_all, map_only

__all__ = ["DEFAULT_TIMEOUT", "clear_node", "fetch", "remotize", "remove", "storage_stats", "store"]

DEFAULT_TIMEOUT: Final = 60.0
_MASK: Final = "attention_mask"


def remotize(obj: Any, *, trim: bool = True, timeout: float = DEFAULT_TIMEOUT) -> Any:
    """The nested `obj` with a handle in place of each of its tensors, which this process stores.

    Args:
        obj: containers of containers of tensors; what `td.tree` knows. Numbers, texts, arrays and None stay as they
            are.
        trim: of a dict with an `attention_mask` of at least two dimensions, leave out the last columns that no row
            of the mask uses: of it, and of tensors in the dict that have as many rows and columns. Used is what is
            not zero. A mask of floats says that only where it is made of 0 and 1, and not of 0 alone: one that is
            added to scores (0 and -inf) says it the other way round, and nothing is left out then.
        timeout: seconds to wait for room where the storage is at its limit.

    Copies are stored: detached, in host memory, of what the tensor shows and nothing around it. The same tensor
    twice is stored once. The shards belong to no step until one claims them, and stay until they are removed or a
    step that claimed them ends.

    Raises `StoreFullError` at the limit, `InvalidTypeError`, with the path, for a tensor that is more than values in
    memory, such as a sparse one, or whose dtype others cannot have, such as a quantized one, and for tensors in a set
    or a view of a dict, in which none is found.
    """
    timeout = check_seconds(timeout)
    found: list[Tensor] = []
    # As long as this lives no other tensor is at the place of one.
    alive: list[Tensor] = []
    places: dict[Any, list[int]] = {}
    order: list[int] = []

    def note(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            if find_all(Tensor, inside(tensor)):
                what = opened(tensor)
                raise Refusal(
                    InvalidTypeError,
                    f"has tensors, which are found in dicts, lists and tuples, and is {what}",
                )
            return tensor
        here = places.setdefault(_place(tensor), [])
        for number in here:
            if alive[number] is tensor or _stands_for(alive[number], tensor):
                break
        else:
            number = len(found)
            found.append(dense(tensor))
            alive.append(tensor)
            here.append(number)
        order.append(number)
        return tensor

    map_only((Tensor, *CLOSED), note, obj, enter=_trimmed if trim else None)
    if not found:
        check_iterator(obj)
        return obj
    handles = backend().store(found, timeout)
    named = iter(order)
    return map_only(Tensor, lambda _: handles[next(named)], obj)


def _place(tensor: Tensor) -> Any:
    """Equal for tensors of which one may stand for the other."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        # It is refused where it is to be stored.
        return id(tensor)
    # Those without memory may be there for zeros, or have lost what they had.
    return tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape


def _stands_for(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors at one place show the same: the rest of what tells them apart, which few are asked for."""
    told = [(tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg()) for tensor in (one, other)]
    return told[0] == told[1]


def _trimmed(container: Any) -> Any:
    """A dict without columns that no row of its mask uses; the same one where there are none."""
    if not isinstance(container, (dict, UserDict)):
        return container
    mask = container.get(_MASK)
    if (
        not isinstance(mask, Tensor)
        or mask.layout is not torch.strided
        or mask.is_nested
        or mask.is_meta
        or mask.dtype not in STORED_DTYPES
        or not is_whole(mask)
    ):
        # It is refused where it is to be stored.
        return container
    if mask.ndim < 2 or not mask.numel():
        return container
    rows, columns = mask.shape[0], mask.shape[-1]
    values = mask.detach()
    try:
        is_used = values.ne(0)
    except RuntimeError:
        # Of a dtype that torch compares with nothing: it says nothing.
        return container
    if (mask.is_floating_point() or mask.is_complex()) and not _says_use(values, is_used):
        return container
    used = is_used.reshape(-1, columns).any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 0
    if width == columns:
        return container
    trimmed = copy.copy(container)
    for key, value in container.items():
        if (
            isinstance(value, Tensor)
            and value.layout is torch.strided
            and not value.is_nested
            and value.ndim >= 2
            and (value.shape[0], value.shape[-1]) == (rows, columns)
        ):
            trimmed[key] = value[..., :width]
    return trimmed


def _says_use(values: Tensor, is_used: Tensor) -> bool:
    """Whether a mask that is no integers says what is used: what is added to scores has 0 there, perhaps alone."""
    return bool(((values.eq(1) == is_used).all() & is_used.any()).item())


def store(shard_id: str, tensor: Tensor, *, timeout: float = DEFAULT_TIMEOUT) -> RTensor:
    """Store a copy of `tensor` under a name; the handle that leads to it.

    A name is not to be given anew within a step: see `remove`.

    Raises `InvalidInputError` where a shard of that name is there, and what `remotize` raises.
    """
    timeout = check_seconds(timeout)
    _check_name(shard_id)
    if not isinstance(tensor, Tensor):
        raise InvalidTypeError(f"store takes a tensor, not a {type(tensor).__qualname__}")
    try:
        values = dense(tensor)
    except Refusal as refusal:
        raise refusal.kind(f"the tensor to be stored as {shard_id} {refusal.reason}") from refusal
    return backend().store_as(shard_id, values, timeout)


def fetch(shard_id: str) -> Tensor:
    """The tensor that this process stores under a name; the caller may write to it, and nobody else sees that.

    Raises `ShardGoneError`.
    """
    _check_name(shard_id)
    found: Tensor = backend().own(shard_id).to_local()
    return found


def _check_name(shard_id: str) -> None:
    if not isinstance(shard_id, str):
        raise InvalidTypeError(f"the name of a shard is a text, not a {type(shard_id).__qualname__}")


def remove(shard_ids: str | Iterable[str]) -> int:
    """Remove shards that this process stores, and what it fetched of them itself; how many there were.

    What others fetched stays with them until their step ends, or `clear_batches` drains it: of another tensor that is
    stored under the name before that, they read the old one. Repetitions, and names of what is not here, count for
    nothing.
    """
    names: Sequence[str] | Iterable[str] = [shard_ids] if isinstance(shard_ids, str) else shard_ids
    check_names(names, "remove")
    return backend().remove(names)["cleared_count"]


def clear_node() -> Removed:
    """Remove all that this process stores and all that it fetched, claimed or not.

    Returns what the storage held: `cleared_count` shards, `num_tensors` and `total_bytes`.
    """
    return backend().clear()


def storage_stats() -> dict[str, Any]:
    """What this process stores.

    `num_tensors` and their `total_bytes`; of them `unclaimed_entries`, `unclaimed_bytes` and the age of the oldest,
    `oldest_unclaimed_seconds`; the most bytes there ever were, `high_water_bytes`; and in `memory` the bytes of
    allocated memory: `limit_bytes`, `used_bytes`, `escaped_bytes` that a view holds although they were removed,
    `idle_bytes`.
    """
    storage = backend().stats()["storage"]
    return {"num_tensors": storage.pop("num_entries"), **storage}
