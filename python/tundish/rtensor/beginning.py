"""How a step of a controller begins: on every worker, under one number, and with its claims.

Owns the numbers of steps and which of them is under way. What always holds:

1. A step has begun everywhere and claimed all that it was to claim, or nothing of it is left: who was told gives up
   what it claimed.
2. Two controllers with the same workers do not share a number.
3. From the end of one step on, what is fetched belongs to the next one.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterable
from typing import Any

from tundish._native import ShardStore
from tundish.errors import InvalidInputError, ShardGoneError
from tundish.rtensor.answers import check_claim, last_number, names_in, refuse
from tundish.rtensor.errands import Errands
from tundish.rtensor.handle import RTensor
from tundish.rtensor.keeping import Keeping
from tundish.rtensor.lines import Lines, Request, StepTakenError, Worker
from tundish.rtensor.process import state
from tundish.rtensor.roster import Roster
from tundish.rtensor.stages import Begun
from tundish.waiting import to_its_end

__all__ = ["HERE", "Beginning"]

# The controller's own process, among workers.
HERE = Worker("this process", "controller")

# Of numbers for a step that others have.
_TRIES = 8
_NUMBERS = 16
# In which owners notice that a line has ended, and with it what was claimed; and between two looks at that.
_NOTICING_SECONDS = 1.0
_TURN_SECONDS = 0.01


class Beginning:
    """Of one controller's steps, which come one after the other.

    A step goes through these, in this order, and whoever uses this calls them in it: `begin_ahead` at the end of the
    one before, for what is fetched between the two; `prepare` and `begin` when it is entered; `contested` and `over`
    when its end is noted; `flush_where_lost` when that is done. The first one of a controller was not begun ahead, and
    one that is not entered, or does not begin, has no end: `forget_next` and `begin` itself see to that.

    Attributes:
        claimant: by which its own process knows the steps of this controller.
        current: the number of the step that is under way.
    """

    def __init__(self, lines: Lines, errands: Errands, roster: Roster, keeping: Keeping) -> None:
        self._lines = lines
        self._errands = errands
        self._roster = roster
        self._keeping = keeping
        self.claimant = secrets.randbits(63)
        self.current: int | None = None
        # The last one that was given.
        self._number: int | None = None
        # By which connections the current step was begun.
        self._begun_by: dict[str, int | None] = {}
        # Whether one has begun in part, and when one was given up that had.
        self._is_partial = False
        self._gave_up = -math.inf
        # The step that has begun already, for what is fetched before it is entered; and those that were to be that, but
        # for workers where the number is another controller's: they end with the current one where they began.
        self._ahead: int | None = None
        self._contested: list[tuple[int, list[Worker]]] = []

    def prepare(self) -> None:
        """See to it that a step can begin. Raises `InvalidInputError` where one is under way."""
        if self.current is not None:
            raise InvalidInputError(f"this controller is in step {self.current}: end that one first")
        if self._is_partial:
            # Of the step before, and who was to give that up was interrupted.
            self._give_up()

    def begin(self, handles: list[RTensor], owners: dict[str, list[str]], noted: list[Begun]) -> None:
        """Have every worker begin the next step, and `owners` claim what `handles` lead to; `noted` gets it.

        Raises `DrainError` and `ShardGoneError`.
        """
        number = self._next_number() if self._ahead is None else self._ahead
        self._is_partial = True
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
            self._begun_by = {one.addr: made(one.addr) for one in self._roster.serving()}
            self.current = number
            were_kept = {one for answer in claims.values() for one in names_in(answer, "kept_shard_ids")}
            lines = {owner: made(owner) for owner in owners}
            self._keeping.begin_step(owners)
            noted.append(Begun(number, handles, owners, lines, were_kept))
            self._is_partial = False
        except BaseException:
            noted.clear()
            self._give_up()
            raise
        finally:
            self._ahead = None

    def begin_at(self, workers: Iterable[Worker]) -> None:
        """Have what these fetch end with the step that is under way, if one is; they are new.

        Who does not answer is drained in the next one.
        """
        if self.current is None:
            return
        begin = Request("POST", f"/epoch/{self.current}/begin")
        answers = self._errands.ask((worker, begin) for worker in workers)
        self._begun_by |= {worker.addr: self._lines.made(worker.addr) for worker in answers}

    def begin_ahead(self) -> None:
        """Have what is fetched from here on belong to the next step.

        Who does not answer is asked again when that is entered.
        """
        # Noted first: whatever comes in between, the next step is this one.
        self._ahead = self._next_number()
        self._begin_everywhere(self._ahead)

    def contested(self) -> list[tuple[int, list[Worker]]]:
        """Numbers that others have, by which the current step was begun at these workers first: they end with it."""
        return [
            (number, [one for one in workers if one is HERE or one.addr in self._roster])
            for number, workers in self._contested
        ]

    def over(self) -> None:
        """What the end of the current step comes to is noted: the next one may begin."""
        self._contested = []
        self.current = None

    def forget_next(self) -> None:
        """There is no next step."""
        self._ahead = None

    def flush_where_lost(self) -> None:
        """Drain workers that took the end of the line for ours: what they fetched since is of the step begun ahead."""
        made, begun_by = self._lines.made, self._begun_by
        serving = self._roster.serving()
        lost = [one for one in serving if made(one.addr) != begun_by.get(one.addr, made(one.addr))]
        if lost and self._ahead is not None:
            flush = Request("POST", f"/epoch/{self._ahead}/flush")
            self._errands.ask((worker, flush) for worker in lost)

    def _next_number(self, *, is_contested: bool = False) -> int:
        if self._number is None or is_contested:
            # One that went before this controller has counted too.
            stats = self._errands.ask((worker, Request("GET", "/stats")) for worker in self._roster.serving())
            self._number = last_number([*stats.values(), json.loads(ShardStore.stats())])
        # Two that ask at the same time do not meet again.
        self._number += 1 + (secrets.randbelow(_NUMBERS) if is_contested else 0)
        return self._number

    def _begin_everywhere(self, number: int) -> dict[Worker, Any]:
        """What became of it, by worker; this process is among them."""
        begin = Request("POST", f"/epoch/{number}/begin")
        answers: dict[Worker, Any] = {}
        server = state().server
        if server is None or server.addr not in self._roster:
            try:
                ShardStore.begin_epoch(number, self.claimant)
                answers[HERE] = {}
            except ShardGoneError as error:
                answers[HERE] = StepTakenError(str(error))
        return answers | self._errands.ask((worker, begin) for worker in self._roster.serving())

    def _claim(self, number: int, owners: dict[str, list[str]]) -> dict[Worker, Any]:
        """What owners answered. Raises `DrainError` and `ShardGoneError`."""
        requests = [
            (self._roster.at(owner), Request("POST", f"/epoch/{number}/claim", {"shard_ids": ids}))
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

    def _give_up(self) -> None:
        """Of a step that did not begin everywhere, or did not claim all."""
        self._gave_up = time.monotonic()
        self.current = None
        self._contested = []

        def give_up() -> None:
            # Without a line to it a worker gives up what was claimed: the shards are as they were.
            self._lines.forget_all_but(set())
            ShardStore.give_up(self.claimant)

        to_its_end(give_up)
        self._is_partial = False
