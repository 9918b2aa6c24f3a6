"""Which ranks of a job share a node, the same answer on all ranks, and the process groups of nodes.

Ranks share a node only if they have one kernel and the same network and IPC namespaces. Ranks that the launcher put on
different nodes are apart, also on one machine. `GROUP_RANK` numbers the launcher's nodes; without it `RANK -
LOCAL_RANK` names one. Either is believed only where `LOCAL_RANK` and `LOCAL_WORLD_SIZE` of all ranks fit it. The first
rank computes the split from what every rank reports and broadcasts it.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tundish.distributed.compressed_lists import compress_list, decompress_list
from tundish.distributed.job_store import torch_distributed
from tundish.distributed.peer_watch import node_identity
from tundish.distributed.process_groups import group_info, new_subgroup
from tundish.distributed.ranks import env_integer
from tundish.distributed.voter import DEFAULT_TIMEOUT, Voter
from tundish.timeouts import timeout_seconds

__all__ = ["RankLocation", "node_group", "nodes_of", "split_into_nodes"]


@dataclass(frozen=True, kw_only=True)
class RankLocation:
    """Where a rank runs, as the system and the launcher say it.

    Attributes:
        rank: the global rank.
        identity: equal exactly on ranks with one kernel and the same network and IPC namespaces.
        group_rank, local_rank, local_world_size: torchrun's variables; None where they are not set.
    """

    rank: int
    identity: str
    group_rank: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None

    @classmethod
    def of_this_process(cls, rank: int) -> RankLocation:
        """The location of this process, `rank` in its job. Raises `InvalidInputError` for a bad variable."""
        alone = cls(rank=rank, identity=node_identity())
        if env_integer("RANK", 0) not in (None, rank):
            # The variables are those of another job, in which this one was started.
            return alone
        return dataclasses.replace(
            alone,
            group_rank=env_integer("GROUP_RANK", 0),
            local_rank=env_integer("LOCAL_RANK", 0),
            local_world_size=env_integer("LOCAL_WORLD_SIZE", 1),
        )


def split_into_nodes(locations: Sequence[RankLocation], *, is_whole_job: bool) -> list[tuple[int, ...]]:
    """The ranks of each node, in the order of `locations`, by the rule at the head of this module."""
    said = [location.group_rank for location in locations]
    if not _fits(locations, said, is_whole_job):
        # In a part of the job, consecutive ranks of a node cannot be told from ranks dealt out in turn.
        said = [_first_of_node(location) if is_whole_job else None for location in locations]
    if not _fits(locations, said, is_whole_job):
        said = [None] * len(locations)
    nodes: dict[tuple[int | None, str], list[int]] = {}
    for location, node in zip(locations, said, strict=True):
        nodes.setdefault((node, location.identity), []).append(location.rank)
    return [tuple(ranks) for ranks in nodes.values()]


def _first_of_node(location: RankLocation) -> int | None:
    return None if location.local_rank is None else location.rank - location.local_rank


def _fits(locations: Sequence[RankLocation], said: Sequence[int | None], is_whole_job: bool) -> bool:
    """Whether `said`, the node of each rank, is possible with the local ranks that the launcher gave them."""
    places: dict[int, list[tuple[int, int]]] = {}
    for location, node in zip(locations, said, strict=True):
        rank, size = location.local_rank, location.local_world_size
        if node is None or rank is None or size is None:
            return False
        places.setdefault(node, []).append((rank, size))
    for members in places.values():
        ranks = {rank for rank, _ in members}
        size, *others = {size for _, size in members}
        missing = size - len(ranks)
        if others or len(ranks) < len(members) or max(ranks) >= size or (is_whole_job and missing):
            return False
    return True


def nodes_of(voter: Voter, *, timeout: timedelta | float = DEFAULT_TIMEOUT) -> list[tuple[int, ...]]:
    """Collective over the members of `voter`: the global ranks of each node.

    Returns:
        One tuple of ranks a node, the same on all members: ranks in the group's order, nodes in that of their first
        ranks.

    Raises:
        What `Voter.vote` raises.
        InvalidInputError: on a rank whose variables are no numbers.
    """
    what = "finding the nodes of the job"
    error, own = None, ""
    try:
        own = json.dumps(dataclasses.asdict(RankLocation.of_this_process(voter.rank)))
    except Exception as caught:  # noqa: BLE001 (the vote raises it again)
        error = caught
    gathered = voter.gather(own, error, what=what, timeout=timeout)
    told = None
    if gathered:
        locations = [RankLocation(**json.loads(location)) for location in gathered]
        is_whole_job = len(voter.ranks) == len(group_info(None).ranks)
        told = compress_list(split_into_nodes(locations, is_whole_job=is_whole_job))
    return [
        tuple(ranks)
        for ranks in decompress_list(voter.broadcast(told, source=voter.ranks[0], what=what, timeout=timeout))
    ]


# Node groups, by the group that they are parts of and live as long as.
_node_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def node_group(group: Any = None, *, timeout: timedelta | float = DEFAULT_TIMEOUT) -> Any:
    """Collective over `group`: the process group of those of its ranks that share this rank's node.

    Ranks share a node if they have the same hostname, boot id, network and IPC namespaces: containers of one machine
    are nodes of their own. torchrun's variables come first: ranks on different nodes by `GROUP_RANK` (without it by
    `RANK`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`) are apart, also on one machine, unless the variables contradict each
    other.

        node = td.distributed.node_group()
        torch.distributed.barrier(node)

    Args:
        group: the `ProcessGroup` to split (None: all ranks). All members make the call, on their calling threads.
        timeout: how long this rank waits for the others, and, in a group that is new, of its collectives;
            seconds or a `timedelta`.

    Returns:
        A gloo `ProcessGroup` of this node's ranks, in the order of `group`; the same one in later calls, until it or
        `group` is destroyed. Without torch.distributed None, which stands for all ranks wherever a group is an
        argument.

    Raises:
        What `vote` raises.
        InvalidInputError: on a rank whose variables are no numbers.

    Example:
        >>> node_group() is None
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
        if not voter.vote(what="looking for the groups of the nodes", flag=is_gone, timeout=timeout):
            return known
        (node,) = (node for node in nodes if voter.rank in node)
        with voter.agreed("making the groups of the nodes", timeout=timeout):
            made = new_subgroup(distributed, node, f"{voter.last_vote.name}-{node[0]}", limit, "gloo")
        _node_groups[key] = made
        return made
