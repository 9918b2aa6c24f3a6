"""`scatter_batch`: one collective call that hands every rank its own batch.

The first call of a group with a source opens a scatter, which lives as long as the group.

Invariants:
- All ranks of a group that call with the same source make the same step.
- If a call's arguments are refused, all scatters on this rank that it might belong to are closed.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tundish.distributed import group_info, torch_distributed
from tundish.errors import InvalidInputError
from tundish.scatter.batch_bytes import IncomingBatch, resolve_device
from tundish.scatter.participants import (
    agree_on_participants,
    participants_of,
    process_group,
    source_index,
)
from tundish.scatter.steps import ScatterReceiver, ScatterSource, ScatterStats
from tundish.scatter.transport.device import device_backend

_Scatter = ScatterSource | ScatterReceiver
# The source's rank in the group, and the name of the group of ranks that get the same batch.
_Key = tuple[int, "str | None"]
_scatters: weakref.WeakKeyDictionary[Any, dict[_Key, _Scatter]] = weakref.WeakKeyDictionary()
_NONE: dict[_Key, _Scatter] = {}
_lock = threading.Lock()


def scatter_batch(
    batches: Any, *, src: int = 0, group: Any = None, replicate: Any = None, device: Any = None
) -> Any:
    """Hand every rank its own batch. Collective over `group`.

    A batch belongs to its receiver: it may be written to, and never changes otherwise.

    Args:
        batches: on the source an iterable of one batch for each rank. None stands for a rank that gets nothing, and in
            place of the iterable for a step without batches. None on all other ranks. A batch is any nest of
            containers that `tundish.tree.flatten` takes.
        src: the source's rank within the group.
        group: a process group or a `DeviceMesh` of one dimension (None: all ranks). All members make the call, one
            thread at a time, in the same order.
        replicate: another dimension of the mesh, or a process group, whose ranks get the same batch. All ranks of
            the mesh make the call. The source is the first rank of its `replicate` group, and has position `src` in
            its `group`. Give several dimensions as one, `mesh["pipeline", "tensor"]._flatten()`.
        device: where the tensors go (None: host memory).

    Returns:
        This rank's batch, or None where the source gave none. On the source it is the object that was given.

    Raises:
        PeerFailedError: the source failed in this step, with its traceback in the message; or a rank was killed, ended
            or was interrupted.
        TimedOutError: a rank did not make the call within the timeout of the group.
        InvalidInputError: the number of batches is wrong, a rank that is not the source gave some, or the scatter is
            closed.
        InvalidTypeError, NotPicklableError: on the source, a batch cannot be sent; the message has its path.
        Exception: an error of the iteration over `batches`, on the source.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> td.scatter_batch([{"input_ids": torch.arange(3)}])
        {'input_ids': tensor([0, 1, 2])}
    """
    scatter = _scatter_of(group, src, replicate)
    try:
        target = resolve_device(device)
        if batches is not None and isinstance(scatter, ScatterReceiver):
            raise InvalidInputError("only the source gives batches: pass None on all other ranks")
    except Exception as error:  # noqa: BLE001 (`fail` raises it: the call is a step all the same)
        scatter.fail(error)
    if isinstance(scatter, ScatterSource):
        return scatter.send(batches, target)()
    received = scatter.receive(target)
    return received.build(target) if isinstance(received, IncomingBatch) else None


def stats(group: Any = None) -> list[ScatterStats]:
    """Return counts of the scatters of `group` on this rank; not collective.

    Args:
        group: as for `scatter_batch`.

    Returns:
        One entry for each source, with steps, batches, bytes and seconds; see `ScatterStats`.

    Example:
        >>> import tundish as td
        >>> td.scatter.stats()
        []
    """
    distributed = torch_distributed()
    key = process_group(group)
    if key is None and distributed.is_initialized():
        key = distributed.group.WORLD
    with _lock:
        found = list(_scatters.get(key, _NONE).values()) if key is not None else []
    return [scatter.stats() for scatter in found]


def _scatter_of(group: Any, src: Any, replicate: Any) -> _Scatter:
    """The scatter that a call is a step of. The first call opens it."""
    distributed = torch_distributed()
    known: dict[_Key, _Scatter] | None = None
    try:
        group = process_group(group)
        is_group = isinstance(group, distributed.ProcessGroup)
        key = distributed.group.WORLD if group is None and distributed.is_initialized() else group
        if not (is_group and group in _scatters):
            group_info(group)
        known = _scatters.get(key, _NONE) if isinstance(key, distributed.ProcessGroup) else _NONE
        replicate = process_group(replicate, "replicate")
        name = None if replicate is None else str(getattr(replicate, "group_name", replicate))
        if known:
            scatter = known.get((source_index(src), name))
            if scatter is not None:
                return scatter
            participants_of(group, src)
    except Exception:
        _close(known)
        raise
    with agree_on_participants(group, src, replicate) as (voter, participants, timeout):
        kind = ScatterSource if participants.rank == participants.source else ScatterReceiver
        scatter = kind(voter, participants, timeout=timeout, device_backend=device_backend(group))
    if key is None:
        return scatter
    with _lock:
        _scatters.setdefault(key, {})[source_index(src), name] = scatter
    weakref.finalize(key, scatter.close).atexit = False
    return scatter


def _close(known: dict[_Key, _Scatter] | None) -> None:
    """Close the scatters that a refused call might belong to; None: all."""
    with _lock:
        all_scatters = [scatter for of_group in _scatters.values() for scatter in of_group.values()]
    for scatter in all_scatters if known is None else list(known.values()):
        scatter.end(
            "passed a bad group, src or replicate, so the scatter is closed: make a new group on all ranks for the "
            "steps that follow"
        )
