"""The ranks of a node: this process's place among them, the same split into nodes on all ranks, and groups of nodes.

Ranks share a node if they have one kernel, the same network and IPC namespaces, and, where the launcher sets it, the
same `GROUP_RANK`. The split is made once, from what every rank reports.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from datetime import timedelta
from typing import Any

from tundish.distributed.job_store import torch_distributed
from tundish.distributed.peer_watch import node_identity
from tundish.distributed.process_groups import group_info, new_subgroup
from tundish.distributed.voter import DEFAULT_TIMEOUT, Voter
from tundish.errors import InvalidInputError
from tundish.timeouts import timeout_seconds

# The node group of this rank, by the group that it is a part of.
_node_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def is_local_rank0() -> bool:
    """Whether this process is local rank 0, the process that works for all ranks of its node.

    Returns:
        True also in a job of one process.

    Raises:
        InvalidInputError: as `local_rank`.

    Example:
        >>> is_local_rank0()
        True
    """
    return local_rank() == 0


def local_rank() -> int:
    """This process's rank among the processes of its node, from `LOCAL_RANK`.

    Returns:
        The rank; 0 in a job of one process without the variable.

    Raises:
        InvalidInputError: `LOCAL_RANK` or `LOCAL_WORLD_SIZE` is no number, the two contradict each other, or the job
            has several processes but `LOCAL_RANK` is not set: every process would take itself for local rank 0.

    Example:
        >>> local_rank()
        0
    """
    rank = env_integer("LOCAL_RANK", 0)
    size = env_integer("LOCAL_WORLD_SIZE", 1)
    if rank is None:
        _refuse_unknown("LOCAL_RANK", size)
        return 0
    if size is not None and rank >= size:
        raise InvalidInputError(
            f"LOCAL_RANK is {rank} but LOCAL_WORLD_SIZE is {size}: a node of {size} processes has local "
            f"ranks 0 to {size - 1}. Set both as torchrun does, or neither"
        )
    return rank


def local_world_size() -> int:
    """The number of this job's processes on this node, from `LOCAL_WORLD_SIZE`.

    Returns:
        The number; 1 in a job of one process without the variable.

    Raises:
        InvalidInputError: as `local_rank`, and when the job has several processes but `LOCAL_WORLD_SIZE` is not set.

    Example:
        >>> local_world_size()
        1
    """
    local_rank()
    size = env_integer("LOCAL_WORLD_SIZE", 1)
    if size is None:
        _refuse_unknown("LOCAL_WORLD_SIZE", env_integer("LOCAL_RANK", 0))
        return 1
    return size


def env_integer(name: str, least: int) -> int | None:
    """The integer in environment variable `name`, at least `least`; None where it is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    # int() would take "1_0" and " 1 " and digits of other scripts, which no launcher writes.
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise InvalidInputError(
            f"{name} is {text!r}, not an integer of at least {least}: let torchrun set it, or unset it"
        )
    return int(text)


def _refuse_unknown(name: str, sibling: int | None) -> None:
    """Refuse to guess `name` where other signs say that this job has several processes."""
    processes = env_integer("WORLD_SIZE", 1) or 1
    if processes == 1 and "torch.distributed" in sys.modules:
        distributed = sys.modules["torch.distributed"]
        if distributed.is_available() and distributed.is_initialized():
            processes = distributed.get_world_size()
    if processes > 1 or (sibling or 0) > 1 or (name == "LOCAL_WORLD_SIZE" and (sibling or 0) > 0):
        raise InvalidInputError(
            f"{name} is not set, though this job has several processes: start it with torchrun, or set "
            "LOCAL_RANK and LOCAL_WORLD_SIZE in every process"
        )


def _node_name(rank: int) -> str:
    """A name that ranks of one node share. Raises `InvalidInputError` for a bad variable."""
    group_rank = None
    # With another RANK, the variables belong to an outer job that started this one.
    if env_integer("RANK", 0) in (None, rank):
        group_rank = env_integer("GROUP_RANK", 0)
    return f"{node_identity()}/{group_rank}"


def nodes_of(voter: Voter, *, timeout: timedelta | float = DEFAULT_TIMEOUT) -> list[tuple[int, ...]]:
    """Collective over the members of `voter`: the global ranks of each node.

    Returns:
        One tuple of ranks for each node, the same on all members. Ranks are in the group's order, nodes in the order of
        their first ranks.

    Raises:
        The errors of `Voter.vote`.
        InvalidInputError: on a rank whose variables are no numbers.
    """
    what = "finding the nodes of the job"
    error, own = None, ""
    try:
        own = _node_name(voter.rank)
    except Exception as caught:  # noqa: BLE001 (the vote raises it again)
        error = caught

    def split(names: list[str]) -> str:
        nodes: dict[str, list[int]] = {}
        for rank, name in zip(voter.ranks, names, strict=True):
            nodes.setdefault(name, []).append(rank)
        return json.dumps(list(nodes.values()))

    found = voter.combine(own, split, error, what=what, timeout=timeout)
    return [tuple(ranks) for ranks in json.loads(found)]


def node_group(group: Any = None, *, timeout: timedelta | float = DEFAULT_TIMEOUT) -> Any:
    """Collective over `group`: the process group of its ranks on this rank's node.

    Ranks share a node if they have the same hostname, boot id, network and IPC namespaces: containers of one machine
    are nodes of their own. Ranks with different `GROUP_RANK`, which torchrun sets, are apart, also on one machine.

    Args:
        group: the `ProcessGroup` to split (None: all ranks). All members make the call, on their calling threads.
        timeout: how long this rank waits for the others; also the timeout of the new group's collectives. Seconds or a
            `timedelta`.

    Returns:
        A gloo `ProcessGroup` of this node's ranks, in the order of `group`; the same one in later calls, until it or
        `group` is destroyed. Without torch.distributed None, which stands for all ranks wherever a group is an
        argument.

    Raises:
        TundishError: as `vote`.
        InvalidInputError: on a rank whose variables are no numbers.

    Example:
        >>> node_group() is None  # this process runs alone; under torchrun it is a ProcessGroup of this node's ranks
        True
    """
    limit = timedelta(seconds=timeout_seconds(timeout))
    if group_info(group).store is None:
        return None
    distributed = torch_distributed()
    key = distributed.group.WORLD if group is None else group
    with Voter(group, timeout=timeout) as voter:
        nodes = nodes_of(voter, timeout=timeout)
        known = _node_groups.get(key)
        is_gone = known is None or known not in distributed.distributed_c10d._world.pg_map
        if not voter.vote(what="looking for the groups of the nodes", flag=is_gone):
            return known
        (node,) = (node for node in nodes if voter.rank in node)
        with voter.agreed("making the groups of the nodes"):
            made = new_subgroup(distributed, node, f"{voter.last_vote.name}-{node[0]}", limit, "gloo")
        _node_groups[key] = made
        return made
