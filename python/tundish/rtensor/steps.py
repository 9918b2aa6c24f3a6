"""Steps without a controller: of one process alone, and of the ranks of a torch.distributed job together.

What always holds: what was fetched in a step is dropped at its end, however it ends; what is fetched between two of
them belongs to the next that begins here, a controller's too; ranks remove what they own when all of them have dropped
what they had fetched.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from tundish._native import ShardStore, shard_ids
from tundish.distributed import Voter, compress_list, decompress_list, voter_of
from tundish.errors import InvalidInputError, ShardGoneError
from tundish.rtensor.answers import last_number
from tundish.rtensor.handle import by_owner, claimed
from tundish.rtensor.lines import Lines, Request, Worker
from tundish.rtensor.process import State, state
from tundish.rtensor.serving import address, trust
from tundish.waiting import to_its_end

__all__ = ["Step", "drain", "keep", "ranks_of", "step"]

_log = logging.getLogger("tundish.rtensor")
_TIMEOUT_SECONDS = 30.0


class Step(NamedTuple):
    """A step under way: its number."""

    number: int


@contextlib.contextmanager
def step(claim: Any = None) -> Iterator[Step]:
    """A step of this process alone: what it fetches in it, and the shards of `claim`, is drained when it ends.

    Args:
        claim: nested containers of handles of shards that this process stores. What is not claimed stays.

    What is fetched between two steps belongs to the later one.

    Raises `ShardGoneError` for a claimed shard that is not here, or is another process's (a `Controller` claims these):
    nothing is drained then. `InvalidInputError` for a step within a step.
    """
    mine = state()
    with _alone(mine):
        ids = shard_ids(claimed(claim, "step"))
        number = _next_number(mine)
        try:
            if ids:
                _claim(number, mine, ids)
            ShardStore.begin_epoch(number, mine.claimant)
        except BaseException:
            # What was claimed stays, and what was fetched ends with the next one.
            ShardStore.give_up(mine.claimant)
            raise
        try:
            yield Step(number)
        finally:
            # Whatever comes in between, Ctrl-C too.
            to_its_end(lambda: _finish(number, mine, ids))


def _finish(number: int, mine: State, claims: list[str]) -> None:
    """End a step, and drop `claims`, also what was fetched of them before it."""
    try:
        ShardStore.clear_buffer(claims)
    finally:
        _end(number, mine)


def _claim(number: int, mine: State, ids: list[str]) -> None:
    _, missing, taken = ShardStore.claim(number, mine.claimant, ids)
    if missing or taken:
        names = ", ".join([*missing, *taken][:8])
        raise ShardGoneError(
            f"this process has not got these shards, or they are another step's: {names}; those of other processes are "
            "claimed with a Controller"
        )


def keep(obj: Any) -> int:
    """Carry over what handles in `obj` lead to: what this process stores or fetched of it does not end with the step.

    It stays until it is removed or drained by its id, or a later step of this process or `drain` claims it.
    Returns the number of entries. A controller knows of what was kept with `Controller.keep` alone: what a
    worker fetched and keeps for itself it takes for a rest, and warns of it.
    """
    handles = claimed(obj, "keep")
    mine = state()
    here = {"local", mine.server.addr if mine.server is not None else "local"}
    others = {one for owner, ids in by_owner(handles).items() if owner not in here for one in ids}
    mine.kept |= others
    kept = ShardStore.keep(mine.keeper, list(others))
    mine.kept_entries += kept
    return kept + ShardStore.keep(mine.keeper, [one for one in shard_ids(handles) if one not in others])


def drain(group: Any = None, *, claim: Any = None) -> None:
    """Collective over a process group: all ranks end their step, drop what they fetched in it, and begin the next one.

    Args:
        group: None is all ranks.
        claim: nested containers of handles, whichever rank owns the shards, and whichever names them: their owners
            remove them when every rank has dropped what it fetched of them, also what it had kept.

    For jobs without a controller, once a step on every rank. What was fetched before the first call belongs to the
    first step. What nobody claims stays stored.

    Raises `PeerFailedError` on all ranks where one of them fails, and what the vote raises.
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
        claims = by_owner(claimed(claim, "drain"))
        to_its_end(lambda: _drop(mine, [one for ids in claims.values() for one in ids]))
    except Exception as error:  # noqa: BLE001 (all ranks raise it)
        problem = error
    if voter.vote(problem, what="drop what was fetched", flag=bool(mine.kept)):
        _drop_what_is_kept(voter, mine, {one for ids in claims.values() for one in ids})
    try:
        _remove(claims)
    except Exception as error:  # noqa: BLE001 (all ranks raise it)
        problem = error
    voter.vote(problem, what="remove what was claimed")


def _drop(mine: State, claims: list[str]) -> None:
    """A step of what was fetched since the last one."""
    number = _next_number(mine)
    ShardStore.begin_epoch(number, mine.claimant)
    _finish(number, mine, claims)


def _drop_what_is_kept(voter: Voter, mine: State, claimed: set[str]) -> None:
    """Collective: drop what was kept of shards that some rank claims. Of many claims few are of what was kept."""
    kept = _of_all(voter, mine.kept, "tell what was kept")
    ending = _of_all(voter, kept & claimed, "tell what is kept no longer")
    dropped = ShardStore.clear_buffer(list(ending & mine.kept))
    mine.kept_entries = max(0, mine.kept_entries - dropped)
    mine.kept -= ending
    voter.vote(what="drop what was kept")


def _of_all(voter: Voter, ids: set[str], what: str) -> set[str]:
    """Collective: what all ranks bring, together."""
    brought = voter.gather(json.dumps(sorted(ids)), what=what)
    together = json.dumps(sorted(set().union(*map(json.loads, brought)))) if brought else None
    return set(json.loads(voter.broadcast(together, source=voter.ranks[0], what=what)))


def _remove(claims: dict[str, list[str]]) -> None:
    server = state().server
    here = claims.pop(server.addr, []) if server is not None else []
    ShardStore.remove([*here, *claims.pop("local", [])])
    if not claims:
        return
    # Handles name whatever host they like: those that this process was told of are shown a token.
    with contextlib.closing(Lines(state().tokens.get, _TIMEOUT_SECONDS)) as lines:
        requests = [
            (Worker(owner, "owner"), Request("DELETE", "/data/clear", {"shard_ids": ids}))
            for owner, ids in claims.items()
        ]
        for answer in lines.ask_all(requests):
            if isinstance(answer, Exception):
                raise answer


@contextlib.contextmanager
def _alone(mine: State) -> Iterator[None]:
    is_ours = False
    try:
        with mine.lock:
            if mine.in_step:
                raise InvalidInputError("this process is in a step already: end that one first")
            # Both before Ctrl-C can come.
            is_ours = mine.in_step = True
        yield
    finally:
        if is_ours:
            mine.in_step = False


def _next_number(mine: State) -> int:
    """That of the step after all that this process knows of."""
    mine.epoch = max(mine.epoch, last_number([json.loads(ShardStore.stats())])) + 1
    return mine.epoch


def _end(number: int, mine: State) -> None:
    ledger = json.loads(ShardStore.end_epoch(number))
    if ledger["escaped_bytes"]:
        _log.warning(
            "%d bytes of step %d escaped: tensors that were handed out in the step are still in use",
            ledger["escaped_bytes"],
            number,
        )
    left = json.loads(ShardStore.stats())["buffer"]
    entries = left["num_entries"] - left["current_entries"]
    if not entries:
        # Drained by its id, or all was flushed.
        mine.kept.clear()
        mine.kept_entries = 0
    # What was kept is there on purpose.
    if entries > max(len(mine.kept), mine.kept_entries):
        _log.warning(
            "%d entries (%d bytes) are still in the fetch buffer after the end of step %d, the oldest of step %s",
            entries,
            left["total_bytes"] - left["current_bytes"],
            number,
            left["oldest_epoch"],
        )
    else:
        _log.debug("step %d is drained", number)


def ranks_of(group: Any, role: str) -> list[Worker]:
    """Collective: where every rank of the group serves, in the group's order, on all ranks alike."""
    from tundish.distributed import group_info

    voter = voter_of(group)
    members = group_info(group)
    own = ""
    error: BaseException | None = None
    try:
        own = json.dumps([address(), role])
    except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
        error = caught
    # Two votes, however many ranks there are: with one for each, a thousand would vote a thousand times.
    what = "tell where a rank serves"
    gathered = voter.gather(own, error, what=what)
    together = compress_list([json.loads(one) for one in gathered]) if gathered else None
    heard = decompress_list(voter.broadcast(together, source=voter.ranks[0], what=what))
    workers = [Worker(addr, role, rank) for rank, (addr, role) in zip(members.ranks, heard, strict=True)]
    server = state().server
    if server is not None and server.token is not None:
        trust(*(worker.addr for worker in workers), token=server.token)
    return workers
