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
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Self

from tundish._native import ShardStore, shard_ids
from tundish.errors import InvalidInputError, ShardGoneError
from tundish.rtensor.answers import (
    Drained,
    by_address,
    check_claim,
    failures_of,
    last_number,
    look_at_buffer,
    look_at_ledger,
    names_in,
    refuse,
    total,
)
from tundish.rtensor.checks import check_claim_of_handles, check_seconds, check_token
from tundish.rtensor.errands import Errands
from tundish.rtensor.handle import RTensor, collect_shards, flatten_shard_ids, handles_of
from tundish.rtensor.hooks import Hooks
from tundish.rtensor.keeping import Keeping
from tundish.rtensor.lines import Lines, Request, StepTakenError, Worker, worker_of
from tundish.rtensor.process import state
from tundish.rtensor.stages import Begun, Ending
from tundish.rtensor.steps import Step, ranks_of
from tundish.waiting import to_its_end

__all__ = ["Controller"]

# Of numbers for a step that others have.
_TRIES = 8
_NUMBERS = 16
# In which owners notice that a line has ended, and with it what was claimed; and between two looks at that.
_NOTICING_SECONDS = 1.0
_TURN_SECONDS = 0.01
# Among workers.
_HERE = Worker("this process", "controller")


class Controller:
    """Drains `workers`, which are all processes that store or fetch. A context manager.

    Args:
        workers: a `Worker(addr, role, rank)` each.
        token: what they were served with; they alone are shown it.
        timeout: seconds until a worker has to have answered, or its `drain` to have ended.

    Raises `InvalidInputError` and `InvalidTypeError` for arguments that cannot be used, and when it is used after
    it was closed, or in a child made by `fork`: one that leaves the block of a step ends nothing.

    Calls come from one thread at a time. Closed, or when its process ends, the workers give up what it claimed.
    """

    def __init__(self, workers: Iterable[Worker], *, token: str | None = None, timeout: float = 30.0) -> None:
        check_token(token)
        timeout = check_seconds(timeout, may_be_zero=False)
        self._is_closed = False
        self._process = os.getpid()
        self._lines = Lines(lambda addr: token if self._is_worker(addr) else None, timeout)
        self._errands = Errands(self._lines, Hooks(timeout))
        self._lock = threading.RLock()
        # By which this process knows the steps of this controller.
        self._claimant = secrets.randbits(63)
        self._keeping = Keeping()
        # By which connections the current step was begun.
        self._begun_by: dict[str, int | None] = {}
        self._number: int | None = None
        self._current: int | None = None
        # Whether one has begun in part, and when one was given up that had.
        self._is_beginning = False
        self._gave_up = -math.inf
        # The step that has begun already, for what is fetched before it is entered; and those that were to be that, but
        # for workers where the number is another controller's: they end with the current one where they began.
        self._ahead: int | None = None
        self._contested: list[tuple[int, list[Worker]]] = []
        self._workers: tuple[Worker, ...] = ()
        # The same by their addresses: what is done for each of them asks for one, and they may be ten thousand.
        self._by_address: dict[str, Worker] = {}
        self.update(workers)

    @classmethod
    def from_group(
        cls, group: Any = None, *, role: str = "worker", token: str | None = None, timeout: float = 30.0
    ) -> Controller:
        """Collective over a process group: a controller of all its ranks, which is to be used on one of them.

        Each rank serves already, or begins to do so at the machine's own address. `role`: that of the calling rank.
        """
        return cls(ranks_of(group, role), token=token, timeout=timeout)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them."""
        return self._workers

    def update(self, workers: Iterable[Worker]) -> None:
        """Take these for the workers from here on: those that are new, and those that are still there.

        What could not be drained of others is let go: those processes are gone.
        """
        self._check_open()
        given = [worker_of(one) for one in workers]
        seen: dict[str, Worker] = {}
        for worker in given:
            if worker.addr in seen:
                raise InvalidInputError(
                    f"two workers serve at {worker.addr}: every process has an address of its own"
                )
            seen[worker.addr] = worker
        self._lines.forget_all_but(seen.keys())
        self._errands.let_go_of_all_but(seen.keys())
        new = [one for one in given if one.addr not in self._by_address and one.drain is None]
        self._workers, self._by_address = tuple(given), seen
        if self._current is not None and new:
            # What they fetch ends with the step that is under way; who does not answer is drained in the next one.
            begin = Request("POST", f"/epoch/{self._current}/begin")
            self._errands.ask((worker, begin) for worker in new)
            self._begun_by |= {worker.addr: self._lines.made(worker.addr) for worker in new}

    def clear_batches(self, *targets: Any) -> Drained:
        """Drain all shards that handles in `targets` lead to: from every buffer, then from their owners.

        Returns what every rank answered. A worker that fails is warned of and tried again at the next step or drain.

        Raises `DrainError` where that has failed before.
        """
        self._check_open()
        for target in targets:
            check_claim_of_handles(target, "clear_batches")
        with self._lock:
            self._errands.catch_up()
            handles = handles_of(targets)
            ids = shard_ids(handles)
            if not ids:
                return Drained(0, 0, 0, {}, {})
            by_owner = collect_shards(handles)
            drop = Request("DELETE", "/buffer/clear", {"shard_ids": ids})
            drops = self._errands.note((worker, drop, ids) for worker in self._workers)
            removals = self._errands.note(self._removals(by_owner))
            ShardStore.clear_buffer(ids)
            dropped = self._errands.carry_out(drops)
            removed = self._errands.carry_out(removals)
            self._keeping.let_go(by_owner)
            self._keeping.dropped(by_address(dropped, "kept_count"))
            for handle in handles:
                handle.forget()
            return Drained(
                total(dropped, "cleared_count"),
                total(removed, "cleared_count"),
                total(removed, "freed_bytes"),
                {**failures_of(dropped), **failures_of(removed)},
                self._look_at_buffers(is_step_over=False),
            )

    @contextlib.contextmanager
    def step(self, claim: Any = None) -> Iterator[Step]:
        """A step: what is fetched in it anywhere, and the shards of `claim`, is drained when it ends.

        Args:
            claim: nested containers of the handles that this step consumes. What nobody claims stays.

        What is fetched between two steps belongs to the later one.

        Raises:
            ShardGoneError: a claimed shard is not there, or another step's. Shards stay; what was fetched ahead goes.
            DrainError: a worker does not begin the step, or could not be drained now and in the step before.
        """
        self._check_open()
        check_claim_of_handles(claim, "step")
        handles = handles_of(claim)
        begun: list[Begun] = []
        noted: list[Ending] = []

        def finish() -> None:
            self._finish(begun, noted)

        try:
            try:
                with self._lock:
                    self._begin(handles, begun)
                yield Step(begun[0].number)
            except (Exception, SystemExit):
                finish()
                raise
            finish()
        except BaseException:
            if not noted:
                # Ctrl-C, for a worker that stands still perhaps: that one is told by the next step.
                self._errands.hurried(finish)
            raise

    def _finish(self, begun: list[Begun], noted: list[Ending]) -> None:
        """End a step that has begun, and begin the next one; `noted` gets what the end comes to."""
        if not begun or os.getpid() != self._process or sys.is_finalizing():
            # In a child made by `fork` the step is the parent's. And as the interpreter ends there is no thread left
            # that could tell workers: they find out.
            return
        (step,) = begun
        with self._lock:
            try:
                to_its_end(lambda: noted.append(self._note_end(step)))
                # First, so that there is no time at which what is fetched belongs to no step.
                self._begin_ahead()
            except BaseException:
                # Who does not answer at once now is told by the next step.
                if noted:
                    self._errands.hurried(lambda: self._end(step, noted[0]))
                raise
            self._end(step, noted[0])
            if self._is_closed:
                # Within the step, for whose end lines were made again.
                self.close()
        ended = {one for ids in noted[0].drained.values() for one in ids}
        for handle in step.handles:
            if handle.shard_id in ended:
                handle.forget()

    def keep(self, obj: Any) -> int:
        """Carry over what handles in `obj` lead to: it does not end with the current step; how many entries that were.

        Its shards are unclaimed again, and what was fetched of them stays until a later step claims or drains them.
        What another controller's step claimed or fetched is kept while this controller is open, and ends with both; a
        step of this one that does not begin gives that up, too.
        """
        self._check_open()
        check_claim_of_handles(obj, "keep")
        by_owner = collect_shards(obj)
        ids = flatten_shard_ids(obj)
        keep = Request("POST", "/keep", {"shard_ids": ids})
        wanted = [(worker, keep) for worker in self._serving()]
        # Others are not drained here, but for what they own.
        wanted += [
            (self._worker_at(owner), Request("POST", "/keep", {"shard_ids": own}))
            for owner, own in by_owner.items()
            if not self._is_worker(owner)
        ]
        self._keeping.begin(ids)
        # Not to be told again later: who was not told by the end of the step drops it with that.
        answers = self._errands.ask(wanted)
        # What the others have not got of it: as an owner this process is told by its line, as who claims there.
        kept = ShardStore.keep(self._claimant, ids)
        self._keeping.note(by_address(answers, "kept_count"))
        refuse("could not be told what to keep", answers)
        self._keeping.succeed(by_owner)
        return kept + total(answers, "kept_count") + total(answers, "kept_shards")

    def stats(self) -> dict[Worker, dict[str, Any] | Exception]:
        """What every worker holds, or why it does not say."""
        self._check_open()
        return self._errands.ask((worker, Request("GET", "/stats")) for worker in self._serving())

    def close(self) -> None:
        """Let go of the workers. Done twice is done once."""
        self._is_closed = True
        self._ahead = None
        if sys.is_finalizing():
            # The lines end with the process.
            return

        def let_go() -> None:
            self._lines.close()
            # As the workers do, which find the end of their lines.
            ShardStore.give_up(self._claimant)

        # Ctrl-C leaves no line open, on which a worker would hold what was claimed.
        to_its_end(let_go)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_number(self, *, is_contested: bool = False) -> int:
        if self._number is None or is_contested:
            # One that went before this controller has counted too.
            self._number = last_number([*self.stats().values(), json.loads(ShardStore.stats())])
        # Two that ask at the same time do not meet again.
        self._number += 1 + (secrets.randbelow(_NUMBERS) if is_contested else 0)
        return self._number

    def _begin_ahead(self) -> None:
        """Have what is fetched from here on belong to the next step.

        Who does not answer is asked again when that is entered.
        """
        # Noted first: whatever comes in between, the next step is this one.
        self._ahead = self._next_number()
        self._begin_everywhere(self._ahead)

    def _begin_everywhere(self, number: int) -> dict[Worker, Any]:
        """What became of it, by worker; this process is among them."""
        begin = Request("POST", f"/epoch/{number}/begin")
        answers: dict[Worker, Any] = {}
        server = state().server
        if server is None or not self._is_worker(server.addr):
            try:
                ShardStore.begin_epoch(number, self._claimant)
                answers[_HERE] = {}
            except ShardGoneError as error:
                answers[_HERE] = StepTakenError(str(error))
        return answers | self._errands.ask((worker, begin) for worker in self._serving())

    def _begin(self, handles: list[RTensor], noted: list[Begun]) -> None:
        """Have every worker begin the next step, and the owners claim; `noted` gets it."""
        owners = collect_shards(handles)
        if self._current is not None:
            raise InvalidInputError(f"this controller is in step {self._current}: end that one first")
        if self._is_beginning:
            # Of the step before, and who was to give that up was interrupted.
            self._give_up_what_began()
        self._errands.catch_up()
        number = self._next_number() if self._ahead is None else self._ahead
        self._is_beginning = True
        try:
            begun = self._begin_everywhere(number)
            for _ in range(_TRIES):
                # By another controller; or a worker lost the line that the step was begun on, and has ended it.
                if not any(isinstance(answer, StepTakenError) for answer in begun.values()):
                    break
                took = [worker for worker, answer in begun.items() if not isinstance(answer, Exception)]
                self._contested.append((number, took))
                number = self._next_number(is_contested=True)
                begun = self._begin_everywhere(number)
            refuse(f"did not begin step {number}", begun)
            claims = self._claim(number, owners)
            made = self._lines.made
            self._begun_by = {one.addr: made(one.addr) for one in self._serving()}
            self._current = number
            were_kept = {one for answer in claims.values() for one in names_in(answer, "kept_shard_ids")}
            lines = {owner: made(owner) for owner in owners}
            self._keeping.begin_step(owners)
            noted.append(Begun(number, handles, owners, lines, were_kept))
            self._is_beginning = False
        except BaseException:
            noted.clear()
            self._give_up_what_began()
            raise
        finally:
            self._ahead = None

    def _claim(self, number: int, owners: dict[str, list[str]]) -> dict[Worker, Any]:
        """What owners answered. Raises `DrainError` and `ShardGoneError`."""
        requests = [
            (self._worker_at(owner), Request("POST", f"/epoch/{number}/claim", {"shard_ids": ids}))
            for owner, ids in owners.items()
        ]
        while True:
            claims = self._errands.ask(requests)
            refuse(f"did not claim shards for step {number}", claims)
            is_noticed = time.monotonic() > self._gave_up + _NOTICING_SECONDS
            if is_noticed or not any(names_in(answer, "taken_shard_ids") for answer in claims.values()):
                break
            time.sleep(_TURN_SECONDS)
        for worker, answer in claims.items():
            check_claim(worker, answer)
        return claims

    def _give_up_what_began(self) -> None:
        """Of a step that did not begin everywhere, or did not claim all."""
        self._gave_up = time.monotonic()
        self._current = None
        self._contested = []

        def give_up() -> None:
            # Without a line to it a worker gives up what was claimed: the shards are as they were.
            self._lines.forget_all_but(set())
            ShardStore.give_up(self._claimant)

        to_its_end(give_up)
        self._is_beginning = False

    def _note_end(self, step: Begun) -> Ending:
        """What the end of the step comes to, noted before any of it is done."""
        drained = self._keeping.ending(step.owners)
        half_kept, by_name = self._keeping.end_step(drained, step.were_kept)
        claims = [one for ids in drained.values() for one in ids]
        end = Request("POST", f"/epoch/{step.number}/end")
        drop_ids = sorted(by_name)
        drop = Request("DELETE", "/buffer/clear", {"shard_ids": drop_ids})
        owners = [self._worker_at(owner) for owner in drained]
        note = self._errands.note
        ending = Ending(
            drained,
            half_kept,
            here=[number for number, workers in self._contested if _HERE in workers] + [step.number],
            contested=note(
                (worker, Request("POST", f"/epoch/{number}/end"), [])
                for number, workers in self._contested
                for worker in workers
                if self._is_worker(worker.addr)
            ),
            consumers=note((worker, end, claims) for worker in self._workers if worker.addr not in drained),
            owners=note((owner, end, claims) for owner in owners),
            drops=note(
                (one, drop, drop_ids) for one in dict.fromkeys([*self._serving(), *owners]) if drop_ids
            ),
            removals=note(self._removals(drained)),
        )
        self._contested = []
        self._current = None
        return ending

    def _end(self, step: Begun, ending: Ending) -> None:
        """Drain the step everywhere, consumers first."""
        to_its_end(lambda: self._end_here(ending))
        self._errands.carry_out_in_turn(ending.contested)
        answers = self._errands.carry_out(ending.consumers)
        answers |= self._errands.carry_out(ending.owners)
        for worker, answer in answers.items():
            if isinstance(answer, dict):
                look_at_ledger(worker, step.number, answer)
        dropped = self._errands.carry_out(ending.drops)
        self._keeping.dropped(by_address(dropped, "kept_count"))
        self._remove_what_owners_have(step, ending, answers)
        self._drop_what_is_of_no_step()
        self._look_at_buffers(is_step_over=True)

    def _end_here(self, ending: Ending) -> None:
        try:
            ShardStore.clear_buffer(
                [*(one for ids in ending.drained.values() for one in ids), *ending.half_kept]
            )
        finally:
            for number in ending.here:
                ShardStore.end_epoch(number)

    def _remove_what_owners_have(self, step: Begun, ending: Ending, answers: dict[Worker, Any]) -> None:
        """Remove what the end of the step left: with who gave up the claim, and who keeps what others do not.

        Who failed to end it may have given up the claim when he is asked again, and is told to remove it then.
        """
        ended = [one for one in ending.removals if not isinstance(answers[one.worker], Exception)]
        made = self._lines.made
        having = [
            one
            for one in ended
            if made(one.worker.addr) != step.lines[one.worker.addr] or ending.half_kept.intersection(one.ids)
        ]
        self._errands.forget(set(ended).difference(having))
        self._errands.carry_out(having)

    def _drop_what_is_of_no_step(self) -> None:
        """Drain workers that took the end of the line for ours: what they fetched since is of the step begun ahead."""
        made, begun_by = self._lines.made, self._begun_by
        lost = [one for one in self._serving() if made(one.addr) != begun_by.get(one.addr, made(one.addr))]
        if lost and self._ahead is not None:
            flush = Request("POST", f"/epoch/{self._ahead}/flush")
            self._errands.ask((worker, flush) for worker in lost)

    def _look_at_buffers(self, *, is_step_over: bool) -> dict[Worker, int]:
        """Warn of what is left in any buffer; by worker."""
        left: dict[Worker, int] = {}
        answers = self._errands.ask((worker, Request("GET", "/buffer/stats")) for worker in self._serving())
        for worker, answer in answers.items():
            # What was carried over is there on purpose.
            expected = self._keeping.expected(worker.addr)
            entries = look_at_buffer(worker, answer, is_step_over=is_step_over, expected=expected)
            if entries is not None:
                self._keeping.saw(worker.addr, entries)
            if entries:
                left[worker] = entries
        return left

    def _check_open(self) -> None:
        if self._is_closed or os.getpid() != self._process:
            reason = "closed" if self._is_closed else f"that of process {self._process}"
            raise InvalidInputError(f"this controller is {reason}: make another one")

    def _serving(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.drain is None]

    def _is_worker(self, addr: str) -> bool:
        return addr in self._by_address

    def _removals(self, owners: dict[str, list[str]]) -> Iterator[tuple[Worker, Request, list[str]]]:
        for owner, ids in owners.items():
            worker = self._worker_at(owner)
            if ids and worker.drain is None:
                yield worker, Request("DELETE", "/data/clear", {"shard_ids": ids}), ids

    def _worker_at(self, addr: str) -> Worker:
        return self._by_address.get(addr) or Worker(addr, "owner")
