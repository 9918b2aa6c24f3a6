"""Ranks, nodes, process groups and votes: what every part that runs on several ranks builds on.

A vote is a collective step in which each rank brings its status. All ranks then go on, or all raise an error that names
the rank that failed. Importing this package does not import torch.
"""

from __future__ import annotations

from tundish.distributed.groups import (
    GroupInfo,
    VoteId,
    abandon_group_creation,
    group_info,
    long_timeout_group,
    new_subgroup,
    temporary_group,
    unique_name,
)
from tundish.distributed.jobstore import JobStore, StoreClientPool, store_address, torch_distributed
from tundish.distributed.nodes import node_group, nodes_of
from tundish.distributed.packed import compress_list, decompress_list
from tundish.distributed.ranks import env_integer, is_local_rank0, local_rank, local_world_size
from tundish.distributed.rounds import store_load_factor
from tundish.distributed.verdict import RankFailure
from tundish.distributed.voter import (
    DEFAULT_TIMEOUT,
    Voter,
    agreed,
    build_once_per_node,
    vote,
    voter_of,
)
from tundish.distributed.watch import PeerWatch, node_identity

__all__ = [
    "DEFAULT_TIMEOUT",
    "GroupInfo",
    "JobStore",
    "PeerWatch",
    "RankFailure",
    "StoreClientPool",
    "VoteId",
    "Voter",
    "abandon_group_creation",
    "agreed",
    "build_once_per_node",
    "compress_list",
    "decompress_list",
    "env_integer",
    "group_info",
    "is_local_rank0",
    "local_rank",
    "local_world_size",
    "long_timeout_group",
    "new_subgroup",
    "node_group",
    "node_identity",
    "nodes_of",
    "store_address",
    "store_load_factor",
    "temporary_group",
    "torch_distributed",
    "unique_name",
    "vote",
    "voter_of",
]
