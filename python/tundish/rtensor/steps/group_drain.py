"""`drain`: ends the step of all ranks of a process group, without a controller.

Invariants:
    An owner removes claimed shards only when every rank has dropped what it fetched of them.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from tundish._native import ShardStore
from tundish.distributed import Voter, voter_of
from tundish.errors import InvalidInputError
from tundish.rtensor.handles import by_owner, required_handles
from tundish.rtensor.process_state import ProcessState, state
from tundish.rtensor.steps.step import drop_fetched
from tundish.rtensor.workers.connections import HttpRequest, WorkerConnections
from tundish.rtensor.workers.worker import Worker

__all__ = ["drain", "remove_claimed"]

_TIMEOUT_SECONDS = 30.0


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
    if voter.vote(problem, what="drop what was fetched", flag=bool(mine.kept)):
        _drop_kept(voter, mine, {shard_id for ids in claims.values() for shard_id in ids})
    try:
        remove_claimed(claims)
    except Exception as error:  # noqa: BLE001 (all ranks raise it)
        problem = error
    voter.vote(problem, what="remove what was claimed")


def _drop_kept(voter: Voter, mine: ProcessState, claims: set[str]) -> None:
    """Collective: drops what was kept of shards that any rank claims."""
    # Claims may be many, and few of them are of kept shards: only these are exchanged.
    kept = _union(voter, mine.kept, "exchange what was kept")
    ending = _union(voter, kept & claims, "exchange what is kept no longer")
    ShardStore.clear_buffer(list(ending & mine.kept))
    mine.kept -= ending
    voter.vote(what="drop what was kept")


def _union(voter: Voter, ids: set[str], what: str) -> set[str]:
    """Collective: the union of the ids of all ranks."""
    gathered = voter.gather(json.dumps(sorted(ids)), what=what)
    union = json.dumps(sorted(set().union(*map(json.loads, gathered)))) if gathered else None
    return set(json.loads(voter.broadcast(union, what=what)))


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
