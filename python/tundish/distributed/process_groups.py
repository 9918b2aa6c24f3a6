"""The members of a process group, and groups with a timeout of their own.

Invariant: the name of a group or voter in the job's store is never used twice, not even after torchrun restarted the
job. Names come from a vote, or from a counter that all members of a set of ranks advance alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from tundish.distributed.job_store import job_start, torch_distributed
from tundish.errors import InvalidInputError
from tundish.timeouts import timeout_seconds

_counters: dict[tuple[str, tuple[int, ...]], itertools.count[int]] = {}
_counters_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """A process group as one of its members sees it.

    Attributes:
        ranks: the global ranks of all members, in the group's order.
        rank: this process's global rank.
        name: the group's name, the same on all members.
        store: the job's store, None in a world of one.
    """

    ranks: tuple[int, ...]
    rank: int
    name: str
    store: Any


class VoteId(NamedTuple):
    """Identifies a vote: the same on all of its ranks, and different for every vote.

    Attributes:
        name: unique in the job, to name what the ranks create together next.
        number: unique among the votes of one voter.
    """

    name: str
    number: int


def group_info(group: Any) -> GroupInfo:
    """The members of `group` (None: all ranks of the job) as this process sees them.

    Without an initialised process group this is a world of one.

    Raises:
        InvalidInputError: this process is not in `group`, `group` was destroyed, or `WORLD_SIZE` says that there are
            other processes but no process group is initialised.
    """
    # The import takes seconds, and a module that nothing imported is not initialised.
    loaded = "torch.distributed" in sys.modules
    distributed = torch_distributed() if loaded or group is not None else None
    if distributed is None or not distributed.is_initialized():
        size = os.environ.get("WORLD_SIZE", "1")
        if size != "1":
            raise InvalidInputError(
                f"WORLD_SIZE is {size} but the process group is not initialised: call "
                "torch.distributed.init_process_group first"
            )
        if group is not None:
            raise InvalidInputError(
                "a process group is given, but torch.distributed is not initialised: call init_process_group first, or "
                "give None in place of the group"
            )
        return GroupInfo(ranks=(0,), rank=0, name="alone", store=None)
    c10d = distributed.distributed_c10d
    rank = distributed.get_rank()
    if group is None:
        group = distributed.group.WORLD
    ranks: tuple[int, ...] = ()
    # torch returns another object to ranks that are not in the group they made.
    if isinstance(group, distributed.ProcessGroup):
        with contextlib.suppress(AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            ranks = tuple(distributed.get_process_group_ranks(group))
    if rank not in ranks:
        raise InvalidInputError(
            f"rank {rank} is not a member of the given group ({group!r}), or the group was destroyed: only "
            "members may make this call"
        )
    return GroupInfo(ranks=ranks, rank=rank, name=str(group.group_name), store=c10d._get_default_store())


def unique_name(kind: str, ranks: tuple[int, ...]) -> str:
    """A new name for `kind` among `ranks`, the same on all of them if all call this equally often."""
    with _counters_lock:
        number = next(_counters.setdefault((kind, ranks), itertools.count()))
    digest = hashlib.sha256(repr((kind, ranks, job_start())).encode()).hexdigest()[:24]
    return f"tundish-{digest}-{number}"


@contextlib.contextmanager
def temporary_group(
    name: str, timeout: timedelta | float, members: tuple[int, ...], *, store: Any = None
) -> Iterator[Any]:
    """Collective over `members`: a gloo group with a timeout of its own, destroyed at the end of the block.

    Args:
        name: a name that no group had before.
        timeout: of every collective of the group; seconds or a `timedelta`.
        members: global ranks. Others do not make the call, and are not waited for.
        store: a client of the job's store in place of the default group's, which others may block.

    Yields:
        The `ProcessGroup`. It is destroyed also when the block raises, without waiting for the other members.
    """
    distributed = torch_distributed()
    group = new_subgroup(
        distributed, members, name, timedelta(seconds=timeout_seconds(timeout)), "gloo", store
    )
    try:
        yield group
    finally:
        # The default group takes all others along when the block destroyed it.
        if distributed.is_initialized() and group in distributed.distributed_c10d._world.pg_map:
            distributed.destroy_process_group(group)


def new_subgroup(
    distributed: Any,
    members: tuple[int, ...],
    name: str,
    timeout: timedelta,
    backend: str,
    store: Any = None,
) -> Any:
    """A group of `members` that only they wait for, under a name of its own.

    `new_group(use_local_synchronization=True)` names a group by its ranks and the number of groups of the process. A
    second group of the same ranks would find the dead addresses of the first one and hang. Members with different
    numbers of groups would never meet. So this calls the function below it, which takes a name.
    """
    c10d = distributed.distributed_c10d
    with _unbound(c10d._get_default_group(), backend):
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(distributed.get_rank()),
            list(members),
            distributed.Backend(backend),
            c10d._get_default_store() if store is None else store,
            name,
            timeout=timeout,
        )
    c10d._world.pg_group_ranks[group] = {member: position for position, member in enumerate(members)}
    return group


@contextlib.contextmanager
def _unbound(default_group: Any, backend: str) -> Iterator[None]:
    """A block in which the default group is bound to no device; for gloo nothing changes.

    NCCL splits each new group off a bound default group, and this waits for all ranks of the job. Groups of other
    backends than gloo are made on the caller's thread only.
    """
    device = default_group.bound_device_id
    if backend != "gloo":
        default_group.bound_device_id = None
    try:
        yield
    finally:
        default_group.bound_device_id = device
