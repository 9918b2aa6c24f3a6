"""`drain_group`: the drain of all ranks of a process group, without a controller.

Invariants:
    - An owner removes claimed shards only when every rank has dropped what it fetched of them.
    - A rank that fails takes part in every vote of a drain, so that all ranks raise its error.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Set
from typing import Any, Protocol

from tundish._native import ShardStore
from tundish.distributed import Voter
from tundish.rtensor.handles import by_owner, required_handles
from tundish.rtensor.workers import HttpRequest, Worker, WorkerConnections

# An owner must answer a drain within this time.
_TIMEOUT_SECONDS = 30.0


class DrainedStore(Protocol):
    """The store of a rank: a `TensorStore`."""

    shards: ShardStore
    kept: set[str]

    def own_addresses(self) -> set[str]:
        """The addresses by which handles name it."""

    def drop_fetched(self, claims: list[str]) -> None:
        """Drop all that was fetched since the last step, and what was fetched of `claims` at any time."""

    def drop_kept(self, shard_ids: Set[str]) -> None:
        """Drop what is kept of these shards of other owners."""


def drain_group(store: DrainedStore, voter: Voter, claim: Any) -> None:
    """Collective: drops what each rank fetched in its `store`, and removes the shards of the handles in `claim`."""
    problem: BaseException | None = None
    claims: dict[str, list[str]] = {}
    try:
        claims = by_owner(required_handles(claim, "claim"))
        store.drop_fetched([shard_id for ids in claims.values() for shard_id in ids])
    except Exception as error:  # noqa: BLE001 (all ranks raise it)
        problem = error
    own = json.dumps([sorted(store.kept), bool(claims.keys() - store.own_addresses())])
    kept, removes_elsewhere = json.loads(voter.combine(own, _merged, problem, what="drop what was fetched"))
    if kept:
        # Exchange only claims on kept shards.
        claimed = {shard_id for ids in claims.values() for shard_id in ids} & set(kept)
        ending = voter.combine(json.dumps(sorted(claimed)), _union, what="exchange what is kept no longer")
        store.drop_kept(set(json.loads(ending)))
        voter.vote(what="drop what was kept")
    try:
        remove_claimed(store, claims)
    except Exception as error:  # noqa: BLE001 (all ranks raise it)
        problem = error
    # A rank that removes shards of its own only cannot fail, and nobody has to wait for it.
    if removes_elsewhere:
        voter.vote(problem, what="remove what was claimed")


def _merged(values: list[str]) -> str:
    """The ids that any rank keeps, and whether any rank removes shards of other processes."""
    kept, flags = zip(*map(json.loads, values), strict=True)
    return json.dumps([sorted(set().union(*kept)), any(flags)])


def _union(values: list[str]) -> str:
    return json.dumps(sorted(set().union(*map(json.loads, values))))


def remove_claimed(store: DrainedStore, claims: dict[str, list[str]]) -> None:
    """Remove shards of `store` and of other owners, given by owner. Raise the first failure."""
    here = store.own_addresses()
    store.shards.remove([shard_id for owner in here for shard_id in claims.get(owner, [])])
    requests = [
        (Worker(owner, "owner"), HttpRequest("DELETE", "/data/clear", ids))
        for owner, ids in claims.items()
        if owner not in here
    ]
    with contextlib.closing(WorkerConnections(_TIMEOUT_SECONDS)) as connections:
        for answer in connections.send_all(requests):
            if isinstance(answer, Exception):
                raise answer
