"""The process that knows all others, and drains them.

Owns the numbers of steps, the claims of the current one, and what could not be drained so far. What always holds:

1. A drain goes to every worker, of every role and rank, consumers before owners, and is judged by the answers of all.
2. What a step claimed is drained when it ends, however it ends.
3. What could not be drained is tried again at the next step or drain, and raised if that fails too.
4. Looking at what is left is never the reason why training stops.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

from tundish._native import ShardStore, shard_ids
from tundish.errors import (
    DrainError,
    InvalidInputError,
    InvalidTypeError,
    ShardGoneError,
    TransferError,
    TundishError,
    counted,
)
from tundish.rtensor.handle import collect_shards, flatten_shard_ids, handles_of
from tundish.rtensor.lines import Lines, Request, Worker, split_address
from tundish.rtensor.process import state

__all__ = ["Controller", "Drained", "Step"]

_log = logging.getLogger("tundish.rtensor")
_NAMED = 8


class Drained(NamedTuple):
    """What a drain came to.

    Attributes:
        entries: that consumers had fetched and have dropped.
        shards: that owners have removed.
        bytes: that these took.
        failures: what could not be drained, by worker; it is tried again.
        left: entries that are still in a buffer, by worker.
    """

    entries: int
    shards: int
    bytes: int
    failures: dict[Worker, Exception]
    left: dict[Worker, int]


class Step(NamedTuple):
    """A step under way: its number."""

    number: int


class _Undone(NamedTuple):
    """A request that failed."""

    worker: Worker
    request: Request | None
    ids: list[str]


class Controller:
    """Drains `workers`, which are all processes that store or fetch. A context manager.

    Args:
        workers: a `Worker(addr, role, rank)` each.
        token: what they were served with; they alone are shown it.
        timeout: seconds until a worker has to have answered.

    Calls come from one thread at a time. Closed, or when its process ends, the workers give up what it claimed.
    """

    def __init__(self, workers: Iterable[Worker], *, token: str | None = None, timeout: float = 30.0) -> None:
        self._lines = Lines(token, timeout)
        self._lock = threading.RLock()
        self._undone: list[_Undone] = []
        # What is not to end with the current step; and what did not end with one before, by which it is not dropped.
        self._kept: set[str] = set()
        self._carried: set[str] = set()
        # Connections to workers that have nothing left of what they fetched in no step; whether this process has not.
        self._settled: dict[str, int | None] = {}
        self._is_settled = False
        self._number: int | None = None
        self._current: int | None = None
        # The step that has begun already, for what is fetched before it is entered.
        self._ahead: int | None = None
        self._workers: tuple[Worker, ...] = ()
        self.update(workers)

    @classmethod
    def from_group(
        cls, group: Any = None, *, role: str = "worker", token: str | None = None, timeout: float = 30.0
    ) -> Controller:
        """Collective over a process group: a controller of all its ranks, which is to be used on one of them.

        Each rank serves already, or begins to do so at the machine's own address. `role`: that of the calling rank.
        """
        from tundish.rtensor.steps import ranks_of

        return cls(ranks_of(group, role), token=token, timeout=timeout)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them."""
        return self._workers

    def update(self, workers: Iterable[Worker]) -> None:
        """Take these for the workers from here on: those that are new, and those that are still there.

        What could not be drained of others is let go: those processes are gone.
        """
        given = [worker if isinstance(worker, Worker) else Worker(*worker) for worker in workers]
        seen: set[str] = set()
        for worker in given:
            if worker.drain is None:
                split_address(worker.addr)
            elif not callable(worker.drain):
                raise InvalidTypeError(
                    f"drain of {worker} is a {type(worker.drain).__qualname__}, not a function"
                )
            if worker.addr in seen:
                raise InvalidInputError(
                    f"two workers serve at {worker.addr}: every process has an address of its own"
                )
            seen.add(worker.addr)
        self._lines.forget_all_but(seen)
        self._settled = {addr: made for addr, made in self._settled.items() if addr in seen}
        self._undone = [one for one in self._undone if one.worker.addr in seen]
        self._workers = tuple(given)

    def clear_batches(self, *targets: Any) -> Drained:
        """Drain all shards that handles in `targets` lead to: from every buffer, then from their owners.

        Returns what every rank answered. A worker that fails is warned of and tried again at the next step or drain.

        Raises `DrainError` where that has failed before.
        """
        with self._lock:
            self._catch_up()
            handles = handles_of(targets)
            ids = shard_ids(handles)
            if not ids:
                return Drained(0, 0, 0, {}, {})
            by_owner = collect_shards(handles)
            ShardStore.clear_buffer(ids)
            drop = Request("DELETE", "/buffer/clear", {"shard_ids": ids})
            dropped = self._tell((worker, drop, ids) for worker in self._workers)
            removed = self._tell(
                _removals((self._worker_at(owner), names) for owner, names in by_owner.items())
            )
            for handle in handles:
                handle.forget()
            return Drained(
                _sum(dropped, "cleared_count"),
                _sum(removed, "cleared_count"),
                _sum(removed, "freed_bytes"),
                {**_failures(dropped), **_failures(removed)},
                self._look_at_buffers(),
            )

    @contextlib.contextmanager
    def step(self, claim: Any = None) -> Iterator[Step]:
        """A step: what is fetched in it anywhere, and the shards of `claim`, is drained when it ends.

        Args:
            claim: nested containers of the handles that this step consumes. What nobody claims stays.

        What is fetched between two steps belongs to the later one.

        Raises:
            ShardGoneError: a claimed shard is not there, or another step's. Nothing is drained then.
            DrainError: a worker does not begin the step, or could not be drained now and in the step before.
        """
        handles = handles_of(claim)
        owners = collect_shards(handles)
        with self._lock:
            if self._current is not None:
                raise InvalidInputError(f"this controller is in step {self._current}: end that one first")
            self._catch_up()
            number = self._next_number() if self._ahead is None else self._ahead
            self._ahead = None
            claimed = self._begin(number, owners)
            self._current = number
        try:
            yield Step(number)
        finally:
            with self._lock:
                self._current = None
                kept, self._kept = self._kept, set()
                drained = {owner: [one for one in ids if one not in kept] for owner, ids in owners.items()}
                self._carried |= kept
                try:
                    # First, so that there is no time at which what is fetched belongs to no step.
                    self._begin_ahead()
                finally:
                    self._end(number, drained, claimed)
            for handle in handles:
                if handle.shard_id not in kept:
                    handle.forget()

    def keep(self, obj: Any) -> int:
        """Carry over what handles in `obj` lead to: it does not end with the current step; how many entries that were.

        Its shards are unclaimed again, and what was fetched of them stays until a later step claims or drains them.
        """
        ids = flatten_shard_ids(obj)
        kept = ShardStore.keep(ids)
        answers = self._tell(
            (worker, Request("POST", "/keep", {"shard_ids": ids}), ids)
            for worker in self._workers
            if worker.drain is None
        )
        _refuse("could not be told what to keep", answers)
        self._kept.update(ids)
        return kept + _sum(answers, "kept_count")

    def stats(self) -> dict[Worker, dict[str, Any] | Exception]:
        """What every worker holds, or why it does not say."""
        asked = [worker for worker in self._workers if worker.drain is None]
        answers = self._lines.ask_all([(worker, Request("GET", "/stats")) for worker in asked], trusted=True)
        return dict(zip(asked, answers, strict=True))

    def close(self) -> None:
        """Let go of the workers. Done twice is done once."""
        self._lines.close()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # As the workers do, which find the end of their lines.
            ShardStore.end_epoch(ahead)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next_number(self) -> int:
        if self._number is None:
            # One that went before this controller has counted too.
            known = [answer for answer in self.stats().values() if isinstance(answer, dict)]
            known.append(json.loads(ShardStore.stats()))
            self._number = max(
                (one["epoch"] for answer in known for one in answer.get("epochs", ())), default=0
            )
        self._number += 1
        return self._number

    def _begin_ahead(self) -> None:
        """Have what is fetched from here on belong to the next step.

        Who does not answer is asked again when that is entered.
        """
        number = self._next_number()
        try:
            ShardStore.begin_epoch(number, state().claimant)
        except ShardGoneError:
            # Another controller of this process had a step of that number: it is asked again what is known.
            self._number = None
            return
        self._ahead = number
        begin = Request("POST", f"/epoch/{number}/begin")
        self._ask((worker, begin) for worker in self._workers if worker.drain is None)

    def _begin(self, number: int, owners: dict[str, list[str]]) -> dict[str, int | None]:
        """Have every worker begin the step, and the owners claim; by which connection each of these did."""
        ShardStore.begin_epoch(number, state().claimant)
        try:
            begin = Request("POST", f"/epoch/{number}/begin")
            begun = self._ask((worker, begin) for worker in self._workers if worker.drain is None)
            _refuse(f"did not begin step {number}", begun)
            claims = self._ask(
                (
                    self._worker_at(owner),
                    Request("POST", f"/epoch/{number}/claim", {"shard_ids": ids}),
                )
                for owner, ids in owners.items()
            )
            _refuse(f"did not claim shards for step {number}", claims)
            for worker, answer in claims.items():
                _check_claim(worker, answer)
        except BaseException:
            # Without a line to it a worker gives up what was claimed: the shards are as they were.
            self._lines.forget([worker.addr for worker in self._workers] + list(owners))
            ShardStore.end_epoch(number)
            self._is_settled = False
            raise
        return {owner: self._lines.made(owner) for owner in owners}

    def _end(self, number: int, owners: dict[str, list[str]], claimed: dict[str, int | None]) -> None:
        """Drain the step everywhere, consumers first."""
        end = Request("POST", f"/epoch/{number}/end")
        claims = [one for ids in owners.values() for one in ids]
        ShardStore.clear_buffer(claims)
        ShardStore.end_epoch(number)
        answers = self._tell((worker, end, claims) for worker in self._workers if worker.addr not in owners)
        answers |= self._tell((self._worker_at(owner), end, claims) for owner in owners)
        for worker, answer in answers.items():
            if isinstance(answer, dict):
                _look_at_ledger(worker, number, answer)
        # An owner that lost the line has given up the claim, and has the shards still.
        for worker, request, ids in _removals((self._worker_at(owner), ids) for owner, ids in owners.items()):
            if isinstance(answers[worker], Exception):
                self._undone.append(_Undone(worker, request, ids))
            elif self._lines.made(worker.addr) != claimed[worker.addr]:
                self._tell([(worker, request, ids)])
        self._drop_what_was_before()
        carried = [one for one in claims if one in self._carried]
        if carried:
            drop = Request("DELETE", "/buffer/clear", {"shard_ids": carried})
            self._tell((worker, drop, carried) for worker in self._workers if worker.drain is None)
            self._carried.difference_update(carried)
        self._look_at_buffers()

    def _drop_what_was_before(self) -> None:
        """Drain workers, and this process, of what they had fetched in no step, which nothing else would.

        That was before their first one, and where they took the end of the line for that of the controller.
        """
        if not self._is_settled and not self._carried:
            ShardStore.clear_buffer()
            self._is_settled = True
        made = {one.addr: self._lines.made(one.addr) for one in self._workers if one.drain is None}
        new = [one for one in self._workers if made.get(one.addr) != self._settled.get(one.addr)]
        if new and not self._carried:
            flush = Request("DELETE", "/buffer/clear", {"shard_ids": None})
            answers = self._ask((worker, flush) for worker in new)
            self._settled |= {
                worker.addr: made[worker.addr]
                for worker, answer in answers.items()
                if isinstance(answer, dict)
            }

    def _tell(self, requests: Iterable[tuple[Worker, Request, list[str]]]) -> dict[Worker, Any]:
        """Have workers drain something; what fails is warned of, and noted for the next time."""
        wanted = list(requests)
        answers = self._ask((worker, request) for worker, request, _ in wanted if worker.drain is None)
        hooked = [
            (worker, partial(worker.drain, ids)) for worker, _, ids in wanted if worker.drain is not None
        ]
        outcomes = self._lines.call_all([call for _, call in hooked])
        answers |= {
            worker: _hooked(worker, answer) for (worker, _), answer in zip(hooked, outcomes, strict=True)
        }
        for worker, request, ids in wanted:
            answer = answers[worker]
            if isinstance(answer, Exception):
                _log.warning("a worker could not be drained, which is tried again: %s", answer)
                self._undone.append(_Undone(worker, request if worker.drain is None else None, ids))
        return answers

    def _ask(self, requests: Iterable[tuple[Worker, Request]]) -> dict[Worker, Any]:
        wanted = list(requests)
        mine = {worker.addr for worker in self._workers}
        answers = self._lines.call_all(
            [partial(self._lines.ask, *one, one[0].addr in mine) for one in wanted]
        )
        return {worker: answer for (worker, _), answer in zip(wanted, answers, strict=True)}

    def _catch_up(self) -> None:
        """Drain what could not be drained before. Raises `DrainError`."""
        undone, self._undone = self._undone, []
        failures: dict[Worker, Exception] = {}
        for one in undone:
            answer: Any = None
            if one.request is not None:
                answer = self._ask([(one.worker, one.request)])[one.worker]
            elif one.worker.drain is not None:
                (outcome,) = self._lines.call_all([partial(one.worker.drain, one.ids)])
                answer = _hooked(one.worker, outcome)
            if isinstance(answer, Exception):
                failures[one.worker] = answer
                self._undone.append(one)
        _refuse("could not be drained, now and before (leave out with update() what is gone)", failures)

    def _look_at_buffers(self) -> dict[Worker, int]:
        """Warn of what is left in any buffer; by worker."""
        left: dict[Worker, int] = {}
        asked = [worker for worker in self._workers if worker.drain is None]
        answers = self._ask((worker, Request("GET", "/buffer/stats")) for worker in asked)
        for worker, answer in answers.items():
            try:
                entries = int(answer["num_entries"])
                if entries:
                    left[worker] = entries
                # What was carried over is there on purpose.
                if entries > len(self._carried | self._kept):
                    _log.warning(
                        "rank %d (%s) at %s still has %s (%d bytes) in its fetch buffer after the drain, the oldest "
                        "of step %s",
                        worker.rank,
                        worker.role,
                        worker.addr,
                        "1 entry" if entries == 1 else f"{entries} entries",
                        answer["total_bytes"],
                        answer.get("oldest_epoch"),
                    )
                else:
                    _log.debug("%s is drained", worker)
            except (TypeError, KeyError, ValueError, TundishError) as error:
                _log.debug("%s does not say what is left in its fetch buffer: %s", worker, answer or error)
        return left

    def _worker_at(self, addr: str) -> Worker:
        for worker in self._workers:
            if worker.addr == addr:
                return worker
        return Worker(addr, "owner")


def _removals(named: Iterable[tuple[Worker, list[str]]]) -> Iterator[tuple[Worker, Request, list[str]]]:
    for worker, ids in named:
        if worker.drain is None:
            yield worker, Request("DELETE", "/data/clear", {"shard_ids": ids}), ids


def _refuse(what: str, answers: dict[Worker, Any]) -> None:
    failures = _failures(answers)
    if failures:
        raise DrainError(_described(what, failures), tuple(failures)) from next(iter(failures.values()))


def _check_claim(worker: Worker, answer: dict[str, Any]) -> None:
    for key, what in (
        ("missing_shard_ids", "has not got, or has drained or removed,"),
        ("taken_shard_ids", "holds for another step"),
    ):
        names: Sequence[str] = answer.get(key, ())
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ShardGoneError(f"{worker} {what} these shards: {', '.join(names[:_NAMED])}{more}")


def _look_at_ledger(worker: Worker, number: int, ledger: dict[str, Any]) -> None:
    if ledger.get("held_bytes"):
        _log.warning("%s still holds %d bytes of step %d after its end", worker, ledger["held_bytes"], number)
    elif ledger.get("has_ended") and ledger.get("viewed_bytes"):
        _log.warning(
            "%d bytes of step %d escaped on %s: tensors that were handed out in the step are still in use there",
            ledger["viewed_bytes"],
            number,
            worker,
        )


def _failures(answers: dict[Worker, Any]) -> dict[Worker, Exception]:
    return {worker: answer for worker, answer in answers.items() if isinstance(answer, Exception)}


def _sum(answers: dict[Worker, Any], key: str) -> int:
    return sum(int(answer.get(key, 0)) for answer in answers.values() if isinstance(answer, dict))


def _hooked(worker: Worker, answer: Any) -> Any:
    """What a function that drains came to, as of a worker that serves."""
    if not isinstance(answer, Exception):
        return {}
    error = TransferError(f"{worker} fails: {type(answer).__name__}: {answer}")
    error.__cause__ = answer
    return error


def _described(what: str, failures: dict[Worker, Exception]) -> str:
    shown = "; ".join(str(error) for error in list(failures.values())[:4])
    more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
    return f"{counted(len(failures), 'worker')} {what}: {shown}{more}"
