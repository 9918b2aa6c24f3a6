"""`scatter_batch`: the next batch of every rank.

Owns the scatterers of this process, one for each group and source, which live as long as the group. What always holds:

1. All ranks of a group that call with the same source make theirs in the same round.
2. A call that is refused before it is known whose round it is leaves no scatter a round behind: it counts for the only
   one of its group, and ends those of which any may be meant.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tundish.distributed import group_info, torch_distributed
from tundish.errors import InvalidInputError
from tundish.scatter.participants import participants_of, process_group, source_index
from tundish.scatter.received_batch import ReceivedBatch, device_of, on_device
from tundish.scatter.refusals import is_no_members, refuse
from tundish.scatter.session import ScatterStats
from tundish.scatter.session_setup import open_scatterer
from tundish.scatter.source import ScatterSession
from tundish.tree import flatten_with_addresses

__all__ = ["scatter_batch", "stats"]

# By group; then by the source's rank in it and the name of the group of those that get the same.
_Key = tuple[int, "str | None"]
_scatterers: weakref.WeakKeyDictionary[Any, dict[_Key, ScatterSession]] = weakref.WeakKeyDictionary()
_NONE: dict[_Key, ScatterSession] = {}
_lock = threading.Lock()


def scatter_batch(
    batches: Any, *, src: int = 0, group: Any = None, replicate: Any = None, device: Any = None
) -> Any:
    """Collective over `group`: the source gives a batch for each rank, and each rank gets its own.

    Args:
        batches: on the source an iterable of one batch for each rank, None for those that get nothing, or None where
            none does; None on all other ranks. A batch is any nest of containers, as `tundish.tree.flatten` takes.
        src: the source's rank within the group.
        group: a process group or a `DeviceMesh` of one dimension (None: all ranks). All members make the call, one
            thread at a time, in the same order.
        replicate: a process group, or a dimension of the mesh that `group` is one of, whose ranks get the same batch;
            several dimensions as one, `mesh["pipeline", "tensor"]._flatten()`.
            Then the ranks of all their groups make the call; the source is rank `src` of the group in which the first
            ranks of `replicate` are.
        device: to which the tensors go (None: they are in host memory).

    A rank that calls with what is no group is named on those who wait for it as the group meets; one that calls with
    another group, or with torch's number for a group that it is not in, when their timeout is over.

    Returns this rank's batch, or None; on the source the very object. A batch is its receiver's own: it may be
    written to, and never changes otherwise.

    Raises:
        PeerFailedError: the source failed, in this round, and its traceback is in the message; or a rank was killed,
        or ended.
        TimedOutError: a rank did not come within the timeout of the group.
        InvalidInputError: not one batch for each rank were given, or some by a rank that is not the source.
        InvalidTypeError, NotPicklableError: on the source, a batch cannot be sent; the message has its path.

    On the source, whatever the iteration over `batches` raised.

        >>> import torch
        >>> import tundish as td
        >>> td.scatter_batch([{"input_ids": torch.arange(3)}])
        {'input_ids': tensor([0, 1, 2])}
    """
    scatterer = _scatterer_of(group, src, replicate)
    try:
        target = device_of(device)
        if batches is not None and not scatterer.is_source:
            raise InvalidInputError("only the source gives batches: pass None on all other ranks")
    except Exception as error:  # noqa: BLE001 (raised again, once the others know)
        scatterer.fail(error)
    if scatterer.is_source:
        own = scatterer.give(batches, target)
        if target is None or own is None:
            return own
        tensors, schema, _ = flatten_with_addresses(own)
        return on_device(schema, tensors, target)
    arrival = scatterer.take(target)
    return arrival.build(target) if isinstance(arrival, ReceivedBatch) else None


def stats(group: Any = None) -> list[ScatterStats]:
    """What the scatters of `group` did on this rank, one for each source.

    Of each `source` and `ranks`, the global ranks of the source and of all who take part; `transports`, by name the
    ranks on the other end; `rounds`, calls so far; `batches`, which were sent or came, and `sent_bytes`;
    `waiting_seconds` for the others; and `memory`, bytes of the source's shared memory: `in_use` on their way or set
    aside for a batch that is likely to come, `cached` for the next batches, `escaped`, which receivers hold.
    """
    distributed = torch_distributed()
    key = process_group(group)
    if key is None and distributed.is_initialized():
        key = distributed.group.WORLD
    with _lock:
        found = list(_scatterers.get(key, _NONE).values()) if key is not None else []
    return [scatterer.stats() for scatterer in found]


def _scatterer_of(group: Any, src: Any, replicate: Any) -> ScatterSession:
    distributed = torch_distributed()
    try:
        group = process_group(group)
        # Those who are not in a group have a number in its place, and no round of it.
        if not (group is None or is_no_members(group) or _is_in_use(group)):
            group_info(group)
    except Exception as error:
        refuse(group, error)
        with _lock:
            known = [scatterer for one in _scatterers.values() for scatterer in one.values()]
        _end(known, "its group")
        raise
    key = group
    if key is None and distributed.is_initialized():
        key = distributed.group.WORLD
    found = _scatterers.get(key, _NONE) if isinstance(key, distributed.ProcessGroup) else _NONE
    try:
        replicate = process_group(replicate, "replicate")
        others = None if replicate is None else str(getattr(replicate, "group_name", replicate))
        if found:
            scatterer = found.get((source_index(src), others))
            if scatterer is not None:
                return scatterer
            # The others may be at a round of one that is there, and not at a vote.
            participants_of(group, src)
    except Exception as error:
        if len(found) == 1:
            next(iter(found.values())).fail(error)
        if not found:
            refuse(replicate, error)
        _end(list(found.values()), "its src or replicate")
        raise
    made = open_scatterer(group, src, replicate)
    if key is None:
        return made
    with _lock:
        _scatterers.setdefault(key, {})[source_index(src), others] = made
    weakref.finalize(key, made.close).atexit = False
    return made


def _is_in_use(group: Any) -> bool:
    """Whether there is a scatter of this group already."""
    return isinstance(group, torch_distributed().ProcessGroup) and group in _scatterers


def _end(scatterers: list[ScatterSession], refused: str) -> None:
    """End what a call may have been a round of that was refused for what it was given."""
    for scatterer in scatterers:
        scatterer.end(
            f"made a call that was refused for {refused}, so that nobody knows of which scatter it was a round: all "
            "ranks make a new group for the rounds that follow"
        )
