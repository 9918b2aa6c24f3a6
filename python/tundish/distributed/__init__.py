"""Ranks, nodes, process groups and votes, for all parts that run on several ranks.

A vote is a collective step in which each rank brings its status. All ranks then go on, or all raise an error that names
the rank that failed. Importing this package does not import torch.
"""

from __future__ import annotations

from tundish.distributed.caller_votes import agreed, build_once_per_node, vote, voter_of
from tundish.distributed.job_store import (
    JobStore,
    second_client,
    store_address,
    store_load_factor,
    torch_distributed,
)
from tundish.distributed.local_ranks import env_integer, is_local_rank0, local_rank, local_world_size
from tundish.distributed.nodes import node_group, nodes_of
from tundish.distributed.peer_watch import PeerWatch, node_identity
from tundish.distributed.process_groups import (
    GroupInfo,
    VoteId,
    group_info,
    new_subgroup,
    temporary_group,
    unique_name,
)
from tundish.distributed.vote_result import RankFailure
from tundish.distributed.voter import DEFAULT_TIMEOUT, Voter

__all__ = [
    "DEFAULT_TIMEOUT",
    "GroupInfo",
    "JobStore",
    "PeerWatch",
    "RankFailure",
    "VoteId",
    "Voter",
    "agreed",
    "build_once_per_node",
    "env_integer",
    "group_info",
    "is_local_rank0",
    "local_rank",
    "local_world_size",
    "new_subgroup",
    "node_group",
    "node_identity",
    "nodes_of",
    "second_client",
    "store_address",
    "store_load_factor",
    "temporary_group",
    "torch_distributed",
    "unique_name",
    "vote",
    "voter_of",
]
