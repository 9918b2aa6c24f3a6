"""The process that knows all others, and drains them.

Owns the drains of steps and of ids, which its parts carry out: who they go to, how a step begins, what is carried over,
what could not be done so far. What always holds:

1. A drain goes to every worker, of every role and rank, consumers before owners, and is judged by the answers of all.
2. What a step claimed is drained when it ends, however it ends.
3. What could not be drained is tried again at the next step or drain, and raised if that fails too.
4. Looking at what is left is never the reason why training stops.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Self

from tundish._native import ShardStore, shard_ids
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.rtensor.answers import (
    Drained,
    by_address,
    failures_of,
    look_at_buffer,
    look_at_ledger,
    refuse,
    total,
)
from tundish.rtensor.beginning import HERE, Beginning
from tundish.rtensor.checks import check_owners, check_seconds, check_token
from tundish.rtensor.errands import Errands
from tundish.rtensor.handle import RTensor, by_owner, claimed
from tundish.rtensor.hooks import Hooks
from tundish.rtensor.keeping import Keeping
from tundish.rtensor.lines import Lines, Request, Worker
from tundish.rtensor.roster import Roster
from tundish.rtensor.stages import Begun, Ending
from tundish.rtensor.steps import Step, ranks_of
from tundish.waiting import to_its_end

__all__ = ["Controller"]


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
        self._lock = threading.RLock()
        self._roster = Roster()
        self._lines = Lines(lambda addr: token if addr in self._roster else None, timeout)
        self._errands = Errands(self._lines, Hooks(timeout))
        self._keeping = Keeping()
        self._beginning = Beginning(self._lines, self._errands, self._roster, self._keeping)
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
        return self._roster.all

    def update(self, workers: Iterable[Worker]) -> None:
        """Take these for the workers from here on: those that are new, and those that are still there.

        What could not be drained of others is let go: those processes are gone.
        """
        self._check_open()
        if not isinstance(workers, Iterable):
            raise InvalidTypeError(
                f"workers is a {type(workers).__qualname__}: give a list of Worker(addr, role, rank)"
            )
        given = list(workers)
        new: list[Worker] = []

        def replace() -> None:
            new.extend(self._roster.replace(given))
            self._lines.forget_all_but(self._roster.addresses())
            self._errands.let_go_of_all_but(self._roster.addresses())

        to_its_end(replace)
        self._beginning.begin_at(new)

    def clear_batches(self, *targets: Any) -> Drained:
        """Drain all shards that handles in `targets` lead to: from every buffer, then from their owners.

        Returns what every rank answered. A worker that fails is warned of and tried again at the next step or drain.

        Raises `DrainError` where that has failed before.
        """
        self._check_open()
        handles = [handle for target in targets for handle in claimed(target, "clear_batches")]
        owned = self._owners_of(handles)
        with self._lock, self._errands.once():
            self._errands.catch_up()
            ids = shard_ids(handles)
            if not ids:
                return Drained(0, 0, 0, {}, {})
            drop = Request("DELETE", "/buffer/clear", {"shard_ids": ids})
            drops = self._errands.note((worker, drop, ids) for worker in self._roster.all)
            removals = self._errands.note(self._removals(owned))
            ShardStore.clear_buffer(ids)
            dropped = self._errands.carry_out(drops)
            removed = self._errands.carry_out(removals)
            self._keeping.let_go(owned)
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
        handles = claimed(claim, "step")
        owners = self._owners_of(handles)
        begun: list[Begun] = []
        noted: list[Ending] = []

        def finish() -> None:
            self._finish(begun, noted)

        try:
            try:
                with self._lock:
                    self._beginning.prepare()
                    self._errands.catch_up()
                    self._beginning.begin(handles, owners, begun)
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
        with self._lock, self._errands.once():
            try:
                to_its_end(lambda: noted.append(self._note_end(step)))
                # Before the next one begins: what ends with this one could be fetched in that, and would stay.
                self._close_claims(step.number, noted[0])
                # Before this one ends: there is no time at which what is fetched belongs to no step.
                self._beginning.begin_ahead()
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
        handles = claimed(obj, "keep")
        owned = self._owners_of(handles)
        ids = shard_ids(handles)
        keep = Request("POST", "/keep", {"shard_ids": ids})
        wanted = [(worker, keep) for worker in self._roster.serving()]
        # Others are not drained here, but for what they own.
        wanted += [
            (self._roster.at(owner), Request("POST", "/keep", {"shard_ids": own}))
            for owner, own in owned.items()
            if owner not in self._roster
        ]
        self._keeping.begin(ids)
        # Not to be told again later: who was not told by the end of the step drops it with that.
        answers = self._errands.ask(wanted)
        # What the others have not got of it: as an owner this process is told by its line, as who claims there.
        kept = ShardStore.keep(self._beginning.claimant, ids)
        self._keeping.note(by_address(answers, "kept_count"))
        refuse("could not be told what to keep", answers)
        self._keeping.succeed(owned)
        return kept + total(answers, "kept_count") + total(answers, "kept_shards")

    def stats(self) -> dict[Worker, dict[str, Any] | Exception]:
        """What every worker holds, or why it does not say."""
        self._check_open()
        return self._errands.ask((worker, Request("GET", "/stats")) for worker in self._roster.serving())

    def close(self) -> None:
        """Let go of the workers. Done twice is done once."""
        self._is_closed = True
        self._beginning.forget_next()
        if sys.is_finalizing():
            # The lines end with the process.
            return

        def let_go() -> None:
            self._lines.close()
            # As the workers do, which find the end of their lines.
            ShardStore.give_up(self._beginning.claimant)

        # Ctrl-C leaves no line open, on which a worker would hold what was claimed.
        to_its_end(let_go)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note_end(self, step: Begun) -> Ending:
        """What the end of the step comes to, noted before any of it is done."""
        drained = self._keeping.ending(step.owners)
        half_kept, by_name = self._keeping.end_step(drained, step.were_kept)
        claims = [one for ids in drained.values() for one in ids]
        end = Request("POST", f"/epoch/{step.number}/end")
        drop_ids = sorted(by_name)
        drop = Request("DELETE", "/buffer/clear", {"shard_ids": drop_ids})
        owners = [self._roster.at(owner) for owner in drained]
        note = self._errands.note
        contested = self._beginning.contested()
        ending = Ending(
            drained,
            half_kept,
            here=[number for number, workers in contested if HERE in workers] + [step.number],
            contested=note(
                (worker, Request("POST", f"/epoch/{number}/end"), [])
                for number, workers in contested
                for worker in workers
                if worker != HERE
            ),
            consumers=note(
                (worker, end, claims) for worker in self._roster.all if worker.addr not in drained
            ),
            owners=note((owner, end, claims) for owner in owners),
            drops=note(
                (one, drop, drop_ids) for one in dict.fromkeys([*self._roster.serving(), *owners]) if drop_ids
            ),
            removals=note(self._removals(drained)),
        )
        self._beginning.over()
        return ending

    def _close_claims(self, number: int, ending: Ending) -> None:
        """Have owners give nobody any more what ends with the step; who does not answer is told of its end anyway."""
        close = Request("POST", f"/epoch/{number}/close")
        owners = [self._roster.at(owner) for owner, ids in ending.drained.items() if ids]
        self._errands.ask((owner, close) for owner in owners if owner.drain is None)

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
        self._beginning.flush_where_lost()
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

    def _look_at_buffers(self, *, is_step_over: bool) -> dict[Worker, int]:
        """Warn of what is left in any buffer; by worker."""
        left: dict[Worker, int] = {}
        answers = self._errands.ask(
            (worker, Request("GET", "/buffer/stats")) for worker in self._roster.serving()
        )
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

    def _owners_of(self, handles: Iterable[RTensor]) -> dict[str, list[str]]:
        """Who owns what `handles` lead to. Raises `InvalidInputError` for owners that nobody reaches."""
        owned = by_owner(handles)
        check_owners(owned.keys() - self._roster.addresses())
        return owned

    def _removals(self, owners: dict[str, list[str]]) -> Iterator[tuple[Worker, Request, list[str]]]:
        for owner, ids in owners.items():
            worker = self._roster.at(owner)
            if ids and worker.drain is None:
                yield worker, Request("DELETE", "/data/clear", {"shard_ids": ids}), ids
