"""From handles to tensors: what a process fetches of others.

What always holds: in one call each shard is asked for once, in one request an owner; each tensor is the caller's
own to write to; what has another dtype or shape than its handle is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tundish._native import RTensor
from tundish.rtensor.backends import backend
from tundish.rtensor.checks import check_names, check_seconds
from tundish.rtensor.handle import handles_of, in_place_of_handles
from tundish.rtensor.memory import tensors_over
from tundish.rtensor.process import state
from tundish.rtensor.rooms import rooms_of
from tundish.rtensor.storing import DEFAULT_TIMEOUT

__all__ = ["clear_fetch_buffer", "fetch_buffer_stats", "localize"]


def localize(
    obj: Any, *, out: Tensor | Sequence[Tensor] | None = None, timeout: float = DEFAULT_TIMEOUT
) -> Any:
    """The nested `obj` with the tensors in place of their handles.

    Args:
        obj: containers of containers of handles, or a handle. Everything else stays as it is.
        out: receive into this tensor, for a handle, or into as many as `obj` has handles, in the order in which
            they are met. They have the handles' shapes and dtypes and are what comes in place of the handles;
            nothing is kept in the buffer. Into contiguous tensors in host memory bytes are received directly. Views
            of one tensor may lie between each other, and have no memory in common; nor have elements of one.
        timeout: seconds until all of it is there.

    What was fetched in this step comes from the buffer, and stays there until the step ends; where no step ever begins
    a warning says so. Everything else is fetched in one request an owner, all owners at once; what other threads are
    fetching already is waited for. Tensors are in host memory, and the caller's to write to: whoever is next sees
    nothing of that. Handles that are equal become one tensor.

    Raises:
        InvalidTypeError: handles are in a set or a view of a dict, in which none is found.
        ShardGoneError: a shard was removed, or drained with its step, or the step ended meanwhile.
        TransferError: an owner does not answer, or sent what is damaged; the message has its address.
        NotAuthorizedError: an owner wants a token; see `serve`.
        ShardMismatchError: what came has another dtype or shape than its handle.
        StoreFullError: the buffer is at its limit, and was until the time was over.
        TimedOutError: it took too long.
    """
    timeout = check_seconds(timeout)
    handles = handles_of(obj)
    rooms = None if out is None else rooms_of(out, handles)
    if not handles:
        return obj
    if rooms is not None:
        _receive(handles, rooms, timeout)
        into = iter(rooms)
        return in_place_of_handles(lambda _: next(into), obj)
    unique = list(dict.fromkeys(handles))
    views = backend().fetch(unique, timeout)
    state().watch.fetched()
    tensors = dict(zip(unique, tensors_over(views, unique), strict=True))
    return in_place_of_handles(tensors.__getitem__, obj)


def _receive(handles: list[RTensor], rooms: list[Tensor], timeout: float) -> None:
    direct = [
        room.is_cpu and room.is_contiguous() and not room.is_conj() and not room.is_neg() for room in rooms
    ]
    targets = [
        room if is_direct else torch.empty(room.shape, dtype=room.dtype, device="cpu")
        for room, is_direct in zip(rooms, direct, strict=True)
    ]
    try:
        backend().fetch_into(handles, targets, timeout)
    finally:
        # What autograd saved of them is not what it was.
        for room, is_direct in zip(rooms, direct, strict=True):
            if is_direct:
                torch.autograd.graph.increment_version(room)
    for room, target in zip(rooms, targets, strict=True):
        if target is not room:
            room.copy_(target)


def clear_fetch_buffer(shard_ids: Iterable[str] | None = None) -> int:
    """Drop what this process fetched of these shards, or all of it; how many entries.

    Tensors that were handed out stay with those who have them.
    """
    if shard_ids is not None:
        check_names(shard_ids, "clear_fetch_buffer")
    return backend().clear_buffer(shard_ids)


def fetch_buffer_stats() -> dict[str, Any]:
    """What this process fetched and keeps until the end of the step.

    `num_entries` and their `total_bytes`, the most bytes there ever were (`high_water_bytes`), `hits` and `misses`,
    `late_inserts_refused` (what came for a step that had ended), `in_flight`, the `oldest_epoch` that has bytes,
    and in `memory` the bytes of allocated memory, as in `storage_stats`.
    """
    found: dict[str, Any] = backend().stats()["buffer"]
    return found
