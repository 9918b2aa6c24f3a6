"""`step` and `keep`: steps of this process alone.

Invariants:
    When a step ends, however it ends, all that was fetched in it is dropped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tundish._native import ShardStore, shard_ids
from tundish.errors import InvalidInputError, ShardGoneError, format_list
from tundish.rtensor.handles import by_owner, required_handles
from tundish.rtensor.process_state import ProcessState, next_step_number, state
from tundish.rtensor.steps.leak_warnings import entries_left, warn_of_escaped

__all__ = ["Step", "drop_fetched", "keep", "step"]

_HERE = "this process"


class Step(NamedTuple):
    """A step under way.

    Attributes:
        number: identifies the step in messages and in `/stats`; later steps have larger numbers.
    """

    number: int


@contextlib.contextmanager
def step(claim: Any = None) -> Iterator[Step]:
    """A step of this process: when the block ends, all that was fetched in it is dropped, and `claim` is removed.

    Fetches between two steps belong to the later one.

    Args:
        claim: nested containers of handles of shards that this process stores. Other shards stay.

    Raises:
        ShardGoneError: a claimed shard does not exist here, or another step claims it. Nothing is drained then. A
            `Controller` claims shards of other processes.
        InvalidInputError: this process is in a step already, or `claim` has tensors and no handles.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> batch = td.rtensor.remotize({"rewards": torch.ones(8)})
        >>> with td.rtensor.step(claim=batch):
        ...     td.rtensor.localize(batch)["rewards"].sum()
        tensor(8.)
        >>> td.rtensor.storage_stats()["num_tensors"]
        0
    """
    mine = state()
    ids = shard_ids(required_handles(claim, "claim"))
    with mine.lock:
        if mine.in_step:
            raise InvalidInputError("this process is in a step already: end that one first")
        mine.in_step = True
    try:
        number = _next_number(mine)
        try:
            if ids:
                _claim(number, mine, ids)
            ShardStore.begin_step(number, mine.claimant)
        except BaseException:
            ShardStore.release_claimant(mine.claimant)
            raise
        try:
            yield Step(number)
        finally:
            ShardStore.clear_buffer(ids)
            _end(number, mine)
    finally:
        mine.in_step = False


def keep(obj: Any) -> int:
    """Carry over the shards of handles in `obj`: they, and what this process fetched of them, outlive the step.

    They stay until they are removed or drained by their ids, or a later `step` of this process or `drain` claims
    them.

    Args:
        obj: nested containers of handles.

    Returns:
        The number of shards and fetched entries that are kept.

    Raises:
        InvalidInputError: `obj` has tensors and no handles.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> batch = td.rtensor.remotize({"rewards": torch.ones(8)})
        >>> with td.rtensor.step(claim=batch):
        ...     td.rtensor.keep(batch)
        1
        >>> td.rtensor.localize(batch)["rewards"].sum()
        tensor(8.)
    """
    handles = required_handles(obj, "obj")
    mine = state()
    here = {"local", mine.server.addr if mine.server is not None else "local"}
    others = {shard_id for owner, ids in by_owner(handles).items() if owner not in here for shard_id in ids}
    mine.kept |= others
    return ShardStore.keep(shard_ids(handles))


def drop_fetched(claims: list[str]) -> None:
    """Drop all that was fetched since the last step, and what was fetched of `claims` at any time."""
    mine = state()
    number = _next_number(mine)
    ShardStore.begin_step(number, mine.claimant)
    ShardStore.clear_buffer(claims)
    _end(number, mine)


def _next_number(mine: ProcessState) -> int:
    # A step whose end was interrupted may be open still.
    ShardStore.release_claimant(mine.claimant)
    return next_step_number()


def _claim(number: int, mine: ProcessState, ids: list[str]) -> None:
    _, missing, taken = ShardStore.claim(number, mine.claimant, ids)
    if missing or taken:
        raise ShardGoneError(
            "this process does not store these shards, or another step claims them: "
            f"{format_list([*missing, *taken])}; use a Controller to claim shards of other processes"
        )


def _end(number: int, mine: ProcessState) -> None:
    warn_of_escaped(_HERE, number, json.loads(ShardStore.end_step(number)))
    left = json.loads(ShardStore.stats())["buffer"]
    if not left["kept_entries"]:
        mine.kept.clear()
    entries_left(_HERE, left, is_step_over=True)
