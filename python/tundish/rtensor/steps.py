"""Steps without a controller: `step` and `keep` of this process alone, and `drain` of all ranks.

Invariants:
    When a step ends, however it ends, all that was fetched in it is dropped.
    An owner removes claimed shards only when every rank has dropped what it fetched of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tundish._native import ShardStore, shard_ids
from tundish.distributed import Voter, voter_of
from tundish.errors import InvalidInputError, ShardGoneError, format_list
from tundish.rtensor.handles import by_owner, required_handles
from tundish.rtensor.monitoring import entries_left, warn_of_escaped
from tundish.rtensor.server import ProcessState, next_step_number, state
from tundish.rtensor.workers import HttpRequest, Worker, WorkerConnections

_HERE = "this process"
# Within which an owner answers a drain.
_TIMEOUT_SECONDS = 30.0


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


def drain(group: Any = None, *, claim: Any = None) -> None:
    """Collective: all ranks end their step, drop what they fetched in it, and begin the next one.

    For jobs without a controller: call it once a step on every rank. Fetches before the first call belong to the
    first step. Shards that nobody claims stay.

    Args:
        group: the process group; None is all ranks.
        claim: nested containers of handles, of any owner. The owners remove these shards when every rank has dropped
            what it fetched or kept of them.

    Raises:
        PeerFailedError: another rank failed; raised on all ranks.
        InvalidInputError: this rank is in a `step` of its own, or `claim` has tensors and no handles.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> with td.rtensor.serve():
        ...     batch = td.rtensor.remotize({"rewards": torch.ones(8)})
        ...     rewards = td.rtensor.localize(batch)["rewards"]
        ...     td.rtensor.drain(claim=batch)
        ...     td.rtensor.storage_stats()["num_tensors"], rewards.sum()
        (0, tensor(8.))
    """
    voter = voter_of(group)
    mine = state()
    problem: BaseException | None = None
    claims: dict[str, list[str]] = {}
    try:
        if mine.in_step:
            raise InvalidInputError(
                "drain ends the step of all ranks, and this one is in a step() of its own"
            )
        claims = by_owner(required_handles(claim, "claim"))
        drop_fetched([shard_id for ids in claims.values() for shard_id in ids])
    except Exception as error:  # noqa: BLE001 (all ranks raise it)
        problem = error
    here = {"local", mine.server.addr if mine.server is not None else "local"}
    mine_of_all = json.dumps([sorted(mine.kept), bool(claims.keys() - here)])
    kept, removes_elsewhere = json.loads(
        voter.combine(mine_of_all, _kept_and_flag, problem, what="drop what was fetched")
    )
    if kept:
        _drop_kept(voter, mine, set(kept), {shard_id for ids in claims.values() for shard_id in ids})
    try:
        remove_claimed(claims)
    except Exception as error:  # noqa: BLE001 (all ranks raise it)
        problem = error
    # A rank that removes shards of its own only cannot fail, and nobody has to wait for it.
    if removes_elsewhere:
        voter.vote(problem, what="remove what was claimed")


def _kept_and_flag(values: list[str]) -> str:
    """The ids that any rank keeps, and whether any rank removes shards of other processes."""
    kept, flags = zip(*map(json.loads, values), strict=True)
    return json.dumps([sorted(set().union(*kept)), any(flags)])


def _drop_kept(voter: Voter, mine: ProcessState, kept: set[str], claims: set[str]) -> None:
    """Collective: drops what was kept of shards that any rank claims."""
    # Claims may be many, and few of them are of kept shards: only these are exchanged.
    ending = set(
        json.loads(
            voter.combine(json.dumps(sorted(kept & claims)), _union, what="exchange what is kept no longer")
        )
    )
    ShardStore.clear_buffer(list(ending & mine.kept))
    mine.kept -= ending
    voter.vote(what="drop what was kept")


def _union(values: list[str]) -> str:
    return json.dumps(sorted(set().union(*map(json.loads, values))))


def remove_claimed(claims: dict[str, list[str]]) -> None:
    """Remove shards here and at their owners, given by owner. Raise the first failure."""
    server = state().server
    here = claims.pop(server.addr, []) if server is not None else []
    ShardStore.remove([*here, *claims.pop("local", [])])
    if not claims:
        return
    requests = [
        (Worker(owner, "owner"), HttpRequest("DELETE", "/data/clear", ids)) for owner, ids in claims.items()
    ]
    with contextlib.closing(WorkerConnections(_TIMEOUT_SECONDS)) as connections:
        for answer in connections.send_all(requests):
            if isinstance(answer, Exception):
                raise answer
