"""Names of the files in a DCP checkpoint."""

from __future__ import annotations

__all__ = ["METADATA", "rank_extra_name", "shard_name"]

# torch's description of the checkpoint.
METADATA = ".metadata"


def shard_name(index: int) -> str:
    """The tensors and objects of a rank, by its index in the group; named as torch's own writer names it."""
    return f"__{index}_0.distcp"


def rank_extra_name(index: int) -> str:
    """The `rank_extra` of a rank, by its index in the group."""
    return f"rank_extra-{index:05d}.json"
