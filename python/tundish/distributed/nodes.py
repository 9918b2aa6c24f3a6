"""Which ranks of a job share a node, the same answer on all ranks, and the process groups of nodes.

Ranks share a node if they have one kernel, the same network and IPC namespaces, and, where the launcher sets it, the
same `GROUP_RANK`. The first rank computes the split from what every rank reports and broadcasts it.
"""

from __future__ import annotations

import json
import weakref
from datetime import timedelta
from typing import Any

from tundish.distributed.job_store import torch_distributed
from tundish.distributed.peer_watch import node_identity
from tundish.distributed.process_groups import group_info, new_subgroup
from tundish.distributed.torchrun_local_rank import env_integer
from tundish.distributed.voter import DEFAULT_TIMEOUT, Voter
from tundish.timeouts import timeout_seconds

__all__ = ["node_group", "nodes_of"]


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
    nodes: dict[str, list[int]] = {}
    for rank, name in zip(voter.ranks, voter.gather(own, error, what=what, timeout=timeout), strict=False):
        nodes.setdefault(name, []).append(rank)
    text = json.dumps(list(nodes.values())) if nodes else None
    split = voter.broadcast(text, what=what, timeout=timeout)
    return [tuple(ranks) for ranks in json.loads(split)]


# The node group of this rank, by the group that it is a part of.
_node_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


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
        The errors of `vote`.
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
