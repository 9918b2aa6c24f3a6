"""Which rank of its node this process is, from the variables that torchrun sets. Does not import torch."""

from __future__ import annotations

import os
import sys

from tundish.errors import InvalidInputError

__all__ = ["env_integer", "is_local_rank0", "local_rank", "local_world_size"]


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
