"""The nodes of a job: which ranks can share memory, agreed on all ranks.

Owns the rule that splits the ranks of a group into nodes, and the process groups made of them. What always holds:

1. Ranks of one node have one kernel and the same network and IPC namespaces, whatever the launcher says.
2. Ranks that the launcher put on different nodes are on different nodes, also on one machine.
3. All ranks go by the same split: the first one works it out from what every rank brings, and tells the others.

The launcher's word is that of torchrun's variables. `GROUP_RANK` numbers the nodes; where it is missing, a node's ranks
count through from its first, so that `RANK - LOCAL_RANK` names it. Either is believed only where `LOCAL_RANK` and
`LOCAL_WORLD_SIZE` of all ranks fit it; where none does, hostname, boot id and namespaces alone tell nodes apart.
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

__all__ = ["Standing", "node_group", "nodes_of", "split_into_nodes"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a rank knows of its place: numbers are None where the launcher said nothing.

    `identity`: equal exactly on ranks with one kernel and the same network and IPC namespaces.
    """

    rank: int
    identity: str
    group_rank: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None

    @classmethod
    def of_this_process(cls, rank: int) -> Standing:
        """The standing of this process, which is `rank` in its job; raises `InvalidInputError` for a bad variable."""
        alone = cls(rank=rank, identity=node_identity())
        if env_integer("RANK", 0) not in (None, rank):
            # Of another job, in which somebody started this one.
            return alone
        return dataclasses.replace(
            alone,
            group_rank=env_integer("GROUP_RANK", 0),
            local_rank=env_integer("LOCAL_RANK", 0),
            local_world_size=env_integer("LOCAL_WORLD_SIZE", 1),
        )


def split_into_nodes(standings: Sequence[Standing], *, is_whole_job: bool) -> list[tuple[int, ...]]:
    """The ranks of each node, in the order of `standings`; see the head of this module for the rule."""
    said = [standing.group_rank for standing in standings]
    if not _fits(standings, said, is_whole_job):
        # Of a part of the job nobody could tell ranks that count through from ranks dealt out in turn.
        said = [_first_of_node(standing) if is_whole_job else None for standing in standings]
    if not _fits(standings, said, is_whole_job):
        said = [None] * len(standings)
    nodes: dict[tuple[int | None, str], list[int]] = {}
    for standing, node in zip(standings, said, strict=True):
        nodes.setdefault((node, standing.identity), []).append(standing.rank)
    return [tuple(ranks) for ranks in nodes.values()]


def _first_of_node(standing: Standing) -> int | None:
    return None if standing.local_rank is None else standing.rank - standing.local_rank


def _fits(standings: Sequence[Standing], said: Sequence[int | None], is_whole_job: bool) -> bool:
    """Whether `said`, the node of each rank, is possible with the local ranks that the launcher gave them."""
    places: dict[int, list[tuple[int, int]]] = {}
    for standing, node in zip(standings, said, strict=True):
        rank, size = standing.local_rank, standing.local_world_size
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
    """Collective over the members of `voter`: their global ranks, node by node; the same on all of them.

    The first rank of a node is the one that does what one rank a node does for the others. Within a node the ranks
    are in the group's order, and nodes are in that of their first ranks.

    Raises what `Voter.vote` raises; `InvalidInputError` on a rank whose variables are no numbers.
    """
    what = "finding the nodes of the job"
    error, own = None, ""
    try:
        own = json.dumps(dataclasses.asdict(Standing.of_this_process(voter.rank)))
    except Exception as caught:  # noqa: BLE001 (the vote raises it again)
        error = caught
    gathered = voter.gather(own, error, what=what, timeout=timeout)
    told = None
    if gathered:
        standings = [Standing(**json.loads(standing)) for standing in gathered]
        is_whole_job = len(voter.ranks) == len(group_info(None).ranks)
        told = compress_list(split_into_nodes(standings, is_whole_job=is_whole_job))
    return [
        tuple(ranks)
        for ranks in decompress_list(voter.broadcast(told, source=voter.ranks[0], what=what, timeout=timeout))
    ]


# The group of this rank's node lives as long as the group that it is a part of.
_node_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def node_group(group: Any = None, *, timeout: timedelta | float = DEFAULT_TIMEOUT) -> Any:
    """Collective over `group`: the process group of those of its ranks that share this rank's node.

    torchrun's variables come first: ranks of different nodes by `GROUP_RANK` (or, without it, by `RANK`, `LOCAL_RANK`
    and `LOCAL_WORLD_SIZE`) are apart, also where they run on one machine. Of those, and where there are no such
    variables or they contradict each other, ranks share a node that have the same hostname, boot id, and network
    and IPC namespaces: containers of one machine are nodes of their own. All ranks come to the same split.

        node = td.distributed.node_group()
        torch.distributed.barrier(node)

    Args:
        group: the `ProcessGroup` to split (None: all ranks). All members make the call, on their calling threads.
        timeout: how long this rank waits for the others, and, in a group that is new, of its collectives;
            seconds or a `timedelta`.

    Returns a gloo `ProcessGroup` of this node's ranks, in the order of `group`; the same one in later calls, until
    it or `group` is destroyed. Without torch.distributed None, which stands for all ranks wherever a group is asked
    for: a process that is alone.

    Raises what `vote` raises; `InvalidInputError` on a rank whose variables are no numbers.

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
