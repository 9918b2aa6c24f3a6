"""Ranks, nodes, process groups and votes, for all parts that run on several ranks.

A vote is a collective step in which each rank brings its status. All ranks then go on, or all raise an error that names
the rank that failed. Importing this package does not import torch.

The names in `__all__` are public. The others, imported as themselves, are for the other parts of tundish.
"""

from __future__ import annotations

from tundish.distributed.job_store import JobStore as JobStore
from tundish.distributed.job_store import second_client as second_client
from tundish.distributed.job_store import store_address as store_address
from tundish.distributed.job_store import store_load_factor as store_load_factor
from tundish.distributed.job_store import torch_distributed as torch_distributed
from tundish.distributed.nodes import env_integer as env_integer
from tundish.distributed.nodes import is_local_rank0, local_rank, local_world_size, node_group
from tundish.distributed.nodes import nodes_of as nodes_of
from tundish.distributed.peer_watch import PeerWatch as PeerWatch
from tundish.distributed.peer_watch import node_identity as node_identity
from tundish.distributed.process_groups import GroupInfo as GroupInfo
from tundish.distributed.process_groups import VoteId as VoteId
from tundish.distributed.process_groups import group_info as group_info
from tundish.distributed.process_groups import new_subgroup as new_subgroup
from tundish.distributed.process_groups import temporary_group as temporary_group
from tundish.distributed.process_groups import unique_name as unique_name
from tundish.distributed.vote_protocol import RankFailure as RankFailure
from tundish.distributed.vote_protocol import same_arguments as same_arguments
from tundish.distributed.voter import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from tundish.distributed.voter import Voter as Voter
from tundish.distributed.voter import agreed, build_once_per_node, vote
from tundish.distributed.voter import voter_of as voter_of

__all__ = [
    "agreed",
    "build_once_per_node",
    "is_local_rank0",
    "local_rank",
    "local_world_size",
    "node_group",
    "vote",
]
