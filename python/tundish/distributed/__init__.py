"""The common ground of all parts that run on several ranks.

Which rank of its node a process is, and which ranks share a node; groups whose collectives may take long; votes, so
that no rank hangs because another failed; and work that one rank of every node does for the others. Importing this does
not import torch.
"""

from __future__ import annotations

from tundish.distributed.groups import long_timeout_group
from tundish.distributed.nodes import node_group, nodes_of
from tundish.distributed.ranks import is_local_rank0, local_rank, local_world_size
from tundish.distributed.voter import (
    DEFAULT_TIMEOUT,
    Voter,
    agreed,
    build_once_per_node,
    vote,
    voter_of,
)

__all__ = [
    "DEFAULT_TIMEOUT",
    "Voter",
    "agreed",
    "build_once_per_node",
    "is_local_rank0",
    "local_rank",
    "local_world_size",
    "long_timeout_group",
    "node_group",
    "nodes_of",
    "vote",
    "voter_of",
]
