"""Steps without a controller: those of one store, and the drain of all ranks of a process group.

Invariants:
    When a step ends, however it ends, all that was fetched in it is dropped.
    In a drain of all ranks, an owner removes claimed shards only when every rank has dropped what it fetched of them.
    A rank that fails takes part in every vote of a drain, so that all ranks raise its error.
"""

from __future__ import annotations

import contextlib
import json
import operator
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Set
from typing import Any, Final, NamedTuple

from tundish._native import ShardStore, shard_ids
from tundish.distributed import Voter
from tundish.errors import InvalidInputError, InvalidTypeError, ShardGoneError, format_integer, format_list
from tundish.rtensor.handles import by_owner, required_handles
from tundish.rtensor.monitoring import entries_left, warn_of_escaped
from tundish.rtensor.workers import HttpRequest, Worker, WorkerConnections

_HERE: Final = "this process"
# An owner must answer a drain within this time.
_TIMEOUT_SECONDS = 30.0
# Every reader of JSON represents it exactly.
_LAST_NUMBER: Final = 2**53 - 1


class Step(NamedTuple):
    """A step under way.

    Attributes:
        number: the number of the step in messages and in `/stats`: the one that was given, else the time of its begin
            in microseconds.
    """

    number: int


class StepKey(NamedTuple):
    """Identifies a step on all processes.

    Attributes:
        id: the time in microseconds. No other step of the job has it, and later steps have larger ones.
        own_number: the caller's own number, which steps of several controllers may share; None without one.
    """

    id: int
    own_number: int | None

    @property
    def number(self) -> int:
        """The number in messages."""
        return self.id if self.own_number is None else self.own_number

    @property
    def path(self) -> str:
        """The beginning of the paths of requests."""
        return f"/step/{self.id}" if self.own_number is None else f"/step/{self.id}:{self.own_number}"


def checked_number(number: Any) -> int | None:
    """Return a caller's number of a step. Raise `InvalidTypeError` or `InvalidInputError` for anything else."""
    if number is None:
        return None
    try:
        value = operator.index(number)
    except TypeError:
        value = None
    if value is None or isinstance(number, bool):
        raise InvalidTypeError(f"number is {number!r}: give the number of your step, an integer")
    if not 0 <= value <= _LAST_NUMBER:
        raise InvalidInputError(f"number is {format_integer(value)}: give 0 to 2**53 - 1")
    return value


class StoreSteps:
    """The steps of one store that no controller began.

    Args:
        shards: the shards of the store.
        own_addresses: returns the addresses by which handles name the store.
    """

    def __init__(self, shards: ShardStore, own_addresses: Callable[[], set[str]]) -> None:
        self._shards = shards
        self._own_addresses = own_addresses
        self._lock = threading.Lock()
        # Identifies the claims of these steps.
        self._claimant = secrets.randbits(63)
        # The id of the last step that began here or on a controller of this store.
        self._last_id = 0
        self._in_step = False
        # Ids of shards of other owners that are kept beyond the end of a step.
        self._kept: set[str] = set()

    def new_key(self, own_number: int | None) -> StepKey:
        """The key of a new step of the store, of these or of a controller."""
        with self._lock:
            self._last_id = max(self._last_id + 1, time.time_ns() // 1000)
            return StepKey(self._last_id, own_number)

    @contextlib.contextmanager
    def step(self, claim: Any, number: Any) -> Iterator[Step]:
        """See `TensorStore.step`."""
        own_number = checked_number(number)
        ids = shard_ids(required_handles(claim, "claim"))
        with self._lock:
            if self._in_step:
                raise InvalidInputError("this store is in a step already: end that one first")
            self._in_step = True
        try:
            key = self._next_key(own_number)
            try:
                if ids:
                    self._claim(key, ids)
                self._shards.begin_step(key.id, self._claimant, key.own_number)
            except BaseException:
                self._shards.release_claimant(self._claimant)
                raise
            try:
                yield Step(key.number)
            finally:
                self._shards.clear_buffer(ids)
                self._end(key)
        finally:
            self._in_step = False

    def keep(self, obj: Any) -> int:
        """See `TensorStore.keep`."""
        handles = required_handles(obj, "obj")
        here = self._own_addresses()
        self._kept |= {
            shard_id for owner, ids in by_owner(handles).items() if owner not in here for shard_id in ids
        }
        return self._shards.keep(shard_ids(handles))

    def drain(self, voter: Voter, claim: Any, number: Any) -> None:
        """See `TensorStore.drain`."""
        problem: BaseException | None = None
        claims: dict[str, list[str]] = {}
        try:
            own_number = checked_number(number)
            claims = by_owner(required_handles(claim, "claim"))
            self._drop_fetched([shard_id for ids in claims.values() for shard_id in ids], own_number)
        except Exception as error:  # noqa: BLE001 (all ranks raise it)
            problem = error
        own = json.dumps([sorted(self._kept), bool(claims.keys() - self._own_addresses())])
        kept, removes_elsewhere = json.loads(
            voter.combine(own, _merged, problem, what="drop what was fetched")
        )
        if kept:
            # Exchange only claims on kept shards.
            claimed = {shard_id for ids in claims.values() for shard_id in ids} & set(kept)
            ending = voter.combine(
                json.dumps(sorted(claimed)), _union, what="exchange what is kept no longer"
            )
            self._drop_kept(set(json.loads(ending)))
            voter.vote(what="drop what was kept")
        try:
            remove_claimed(self._shards, self._own_addresses(), claims)
        except Exception as error:  # noqa: BLE001 (all ranks raise it)
            problem = error
        # A rank that removes shards of its own only cannot fail, and nobody has to wait for it.
        if removes_elsewhere:
            voter.vote(problem, what="remove what was claimed")

    def _drop_fetched(self, claims: list[str], own_number: int | None) -> None:
        """Drop all that was fetched since the last step, and what was fetched of `claims` at any time."""
        if self._in_step:
            raise InvalidInputError(
                "drain ends the step of all ranks, and this one is in a step() of its own"
            )
        key = self._next_key(own_number)
        self._shards.begin_step(key.id, self._claimant, key.own_number)
        self._shards.clear_buffer(claims)
        self._end(key)

    def _drop_kept(self, ids: Set[str]) -> None:
        """Drop what is kept of these shards of other owners."""
        self._shards.clear_buffer(list(ids & self._kept))
        self._kept -= ids

    def _next_key(self, own_number: int | None) -> StepKey:
        # A step whose end was interrupted may be open still.
        self._shards.release_claimant(self._claimant)
        return self.new_key(own_number)

    def _claim(self, key: StepKey, ids: list[str]) -> None:
        _, missing, taken = self._shards.claim(key.id, self._claimant, ids, key.own_number)
        if missing or taken:
            raise ShardGoneError(
                "this store does not hold these shards, or another step claims them: "
                f"{format_list([*missing, *taken])}; use a Controller to claim shards of other processes"
            )

    def _end(self, key: StepKey) -> None:
        warn_of_escaped(_HERE, key.number, json.loads(self._shards.end_step(key.id, key.own_number)))
        left = json.loads(self._shards.stats())["buffer"]
        if not left["kept_entries"]:
            self._kept.clear()
        entries_left(_HERE, left, is_step_over=True)


def _merged(values: list[str]) -> str:
    """The ids that any rank keeps, and whether any rank removes shards of other processes."""
    kept, flags = zip(*map(json.loads, values), strict=True)
    return json.dumps([sorted(set().union(*kept)), any(flags)])


def _union(values: list[str]) -> str:
    return json.dumps(sorted(set().union(*map(json.loads, values))))


def remove_claimed(shards: ShardStore, here: Set[str], claims: dict[str, list[str]]) -> None:
    """Remove shards by owner: of `shards`, whose addresses are `here`, and of others. Raise the first failure."""
    shards.remove([shard_id for owner in here for shard_id in claims.get(owner, [])])
    requests = [
        (Worker(owner, "owner"), HttpRequest("DELETE", "/data/clear", ids))
        for owner, ids in claims.items()
        if owner not in here
    ]
    with contextlib.closing(WorkerConnections(_TIMEOUT_SECONDS)) as connections:
        for answer in connections.send_all(requests):
            if isinstance(answer, Exception):
                raise answer
