"""Who is in a process group, and groups whose collectives may take long.

What always holds: names under which ranks meet in the job's store (of groups and of voters) are never used twice in a
process's life, nor by the process that takes its place when torchrun starts the job again, so that nothing left in the
store by a former group is ever read by a new one. They come from a counter that every member of a set of ranks advances
alike, or from a vote.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from tundish.distributed.jobstore import Leaving, start_of_job, torch_distributed
from tundish.errors import InvalidInputError, PeerFailedError, listed
from tundish.timeouts import timeout_seconds
from tundish.waiting import Moment, Thread, wait_for

__all__ = [
    "GroupInfo",
    "Unbinding",
    "VoteId",
    "abandon_group_creation",
    "group_info",
    "long_timeout_group",
    "new_subgroup",
    "temporary_group",
    "unique_name",
]

# How long the end of a group waits for the store.
_LEAVING_SECONDS = 1.0

_counters: dict[tuple[str, tuple[int, ...]], itertools.count[int]] = {}
_counters_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """A group as one of its members sees it.

    `ranks`: the global ranks of all members, in the group's order; `rank`: this process's global rank;
    `name`: the group's name, the same on all members; `store`: the job's store, None in a world of one.
    """

    ranks: tuple[int, ...]
    rank: int
    name: str
    store: Any


class VoteId(NamedTuple):
    """Of a vote: a `name` for what the ranks that came to it make together, and a `number`.

    They are the same on all of these ranks; no other vote has the name, nor, of the same voter, the number.
    """

    name: str
    number: int


def group_info(group: Any) -> GroupInfo:
    """This process's view in `group` (None: all ranks of the job).

    Without an initialised process group this is a world of one.

    Raises `InvalidInputError` when this process is not in `group`, when `group` was destroyed, and when
    `WORLD_SIZE` says that there are other processes but no process group was initialised.
    """
    # Where nothing imported torch.distributed yet, nothing initialised it: not worth the seconds.
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
            raise InvalidInputError("a group was given but torch.distributed is not initialised (any more)")
        return GroupInfo(ranks=(0,), rank=0, name="alone", store=None)
    c10d = distributed.distributed_c10d
    rank = distributed.get_rank()
    if group is None:
        group = distributed.group.WORLD
    ranks: tuple[int, ...] = ()
    # Else it is what torch hands to ranks that are not in the group they made, or something that it takes for None.
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
    """A name never used before for `kind` among `ranks`: equal on all of them when all ask equally often."""
    with _counters_lock:
        number = next(_counters.setdefault((kind, ranks), itertools.count()))
    digest = hashlib.sha256(repr((kind, ranks, start_of_job())).encode()).hexdigest()[:24]
    return f"tundish-{digest}-{number}"


@contextlib.contextmanager
def long_timeout_group(
    timeout: timedelta | float, ranks: Sequence[int] | None = None, *, backend: str = "gloo"
) -> Iterator[Any]:
    """Collective over `ranks`: a process group with a timeout of its own, destroyed at the end of the block.

    For waiting on slow work, which the default group's timeout must not cut short:

        with long_timeout_group(timedelta(hours=2)) as group:
            torch.distributed.barrier(group)

    Args:
        timeout: of every collective of the group; seconds or a `timedelta`.
        ranks: global ranks of the members (None: all ranks). Only members make the call, in the same
            order as their other calls over the same ranks; others are not waited for.
        backend: of the group. Keep gloo unless the caller's thread alone uses the group.

    Yields the `ProcessGroup`. It is destroyed also when the block raises, without waiting for the other
    members.

    Raises `InvalidInputError` for a timeout that is not positive, for ranks that are repeated, out of range
    or leave out this one, and where torch.distributed is not initialised.
    """
    limit = timedelta(seconds=timeout_seconds(timeout))
    distributed = torch_distributed()
    if distributed is None or not distributed.is_initialized():
        raise InvalidInputError(
            "a group needs torch.distributed: call torch.distributed.init_process_group first"
        )
    size, rank = distributed.get_world_size(), distributed.get_rank()
    members = tuple(range(size)) if ranks is None else tuple(sorted(ranks))
    if len(set(members)) != len(members) or not all(0 <= member < size for member in members):
        raise InvalidInputError(f"ranks are [{listed(members)}]: give distinct ranks of 0 to {size - 1}")
    if rank not in members:
        raise InvalidInputError(
            f"rank {rank} is not among the ranks [{listed(members)}]: only members make this call"
        )
    with temporary_group(unique_name("group", members), limit, members, backend=backend) as group:
        yield group


@contextlib.contextmanager
def temporary_group(
    name: str,
    timeout: timedelta | float,
    members: tuple[int, ...],
    *,
    backend: str = "gloo",
    store: Any = None,
) -> Iterator[Any]:
    """Collective over `members`: as `long_timeout_group`, under a `name` that no group had before.

    `store`: another way to the job's store than that of the default group, which somebody may hold up.
    """
    distributed = torch_distributed()
    limit = timedelta(seconds=timeout_seconds(timeout))
    base = distributed.distributed_c10d._get_default_store()
    # Where its members are to be found, as torch and gloo name it: by the group, the device, and the only context.
    addresses = [f"cpu//0/{member}" for member in range(len(members))] if backend == "gloo" else []
    leaving = Leaving(base, f"{name}/", len(members), addresses)
    try:
        group = new_subgroup(distributed, members, name, limit, backend, store)
        try:
            yield group
        finally:
            # The default group takes all others along when the block destroyed it.
            if distributed.is_initialized() and group in distributed.distributed_c10d._world.pg_map:
                distributed.destroy_process_group(group)
    finally:
        _leave(leaving)


def _leave(leaving: Leaving) -> None:
    over = Moment()

    def leave() -> None:
        try:
            # Whoever hosted the store may have ended.
            with contextlib.suppress(Exception):
                leaving.leave()
        finally:
            over.come()

    # The store may stand still, which the end of a group does not wait for.
    with contextlib.suppress(RuntimeError):
        Thread(leave, "tundish-leaving").start()
        wait_for(over.wait, _LEAVING_SECONDS)


def new_subgroup(
    distributed: Any,
    members: tuple[int, ...],
    name: str,
    timeout: timedelta,
    backend: str,
    store: Any = None,
) -> Any:
    """A group of `members` that only they wait for, under a name of its own.

    `new_group(use_local_synchronization=True)` has the right waiting, but names a group by its ranks and the
    number of groups that the process holds: a second group of the same ranks, made after the first was
    destroyed, gets the same name, finds the first one's dead addresses in the store and hangs; and members
    that hold different numbers of groups never meet. So this takes the step below it, where the name can be
    chosen.
    """
    c10d = distributed.distributed_c10d
    with _unbinding.of(c10d._get_default_group()):
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


class Unbinding:
    """Blocks in which the default group is bound to no device; several threads may be in one at once.

    Bound to one, it would have NCCL split each new group off, for which all ranks of the job are waited for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The threads that are in such a block.
        self._inside: list[threading.Thread] = []
        # Those that were left behind.
        self._left: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._default_group: Any = None
        self._device: Any = None

    @contextlib.contextmanager
    def of(self, default_group: Any) -> Iterator[None]:
        """Such a block; what the first found, the last puts back.

        Raises `PeerFailedError` on a thread that was left behind.
        """
        thread = threading.current_thread()
        with self._lock:
            if thread in self._left:
                raise PeerFailedError("nobody wants the group any more", -1)
            if not self._inside:
                self._default_group = default_group
                self._device, default_group.bound_device_id = default_group.bound_device_id, None
            self._inside.append(thread)
        try:
            yield
        finally:
            self.end(thread)

    def end(self, thread: threading.Thread) -> None:
        """`thread` is in such a block no more."""
        with self._lock:
            self._end(thread)

    def leave(self, thread: threading.Thread) -> None:
        """`thread` is left behind, in such a block or on its way to one."""
        with self._lock:
            self._left.add(thread)
            self._end(thread)

    def _end(self, thread: threading.Thread) -> None:
        if thread in self._inside:
            self._inside.remove(thread)
            if not self._inside:
                self._default_group.bound_device_id = self._device
                self._default_group = None


_unbinding = Unbinding()


def abandon_group_creation(thread: threading.Thread) -> None:
    """Nobody waits any more for the group that `thread` makes: the default group is to be as it was."""
    _unbinding.leave(thread)
