"""The votes of one group as their callers see them: each waits for a round as long as it is told, and no longer.

A `Channel` owns the thread that goes through the rounds (`tundish.distributed.rounds`). Its invariants:

1. Every call to `hold` is the next round on its rank, whatever came of the former one; members that may have gone
   through different numbers of rounds meet again with `skip_to`.
2. The caller's thread never touches the store, which can block for as long as its host is stopped; a thread of the
   channel does, and a caller whose time is up leaves it behind. It ends when the store answers. One that is not left
   behind serves the next round too: an interpreter that is ending may start no threads any more, and still votes.
3. Each round is first decided, or given up, in the memory that the members share if they are on one node
   (`tundish.distributed.ballots`), on the caller's thread; the store is for those that were given up.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping

from tundish.distributed.ballots import Ballots
from tundish.distributed.groups import GroupInfo, VoteId, unique_name
from tundish.distributed.rounds import LINGER_SECONDS, Protocol, store_load_factor
from tundish.distributed.verdict import Outcome, RankFailure
from tundish.distributed.vote_round import Round
from tundish.errors import InvalidInputError, PeerFailedError, StoreLostError, TundishError, VoteTimeoutError
from tundish.waiting import Moment, Thread, wait_for

__all__ = ["Channel"]

# How long past its deadline a caller waits for the store to take in that the deadline passed: in parts, of which a
# process that stands still, so that its other threads do too, loses one and no more.
_ANSWER_SECONDS = 1.0
_ANSWER_PARTS = 8


class _Look:
    """At what is known of a round before it begins. `is_lost`: whether it will not go well, once that is `done`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_lost = False
        self.done = Moment()


# Rounds, and looks at them, for one thread; None ends it.
_Work = queue.SimpleQueue["tuple[Channel, Round | _Look] | None"]


def _serve(rounds: _Work) -> None:
    # Between rounds it holds no channel, so that one which nobody uses any more is let go of.
    while (work := rounds.get()) is not None:
        channel, current = work
        channel._run(current)
        del work, channel, current


class Channel:
    """Votes among the members of one group. All members make it, in the same order.

    `node`: ranks that give the same name watch each other and have one builder; they must share a kernel
    and a network namespace. `gone_before`: what tells, while the members meet, which ranks of the job are gone.
    """

    def __init__(
        self, member: GroupInfo, node: str, gone_before: Callable[[], Mapping[int, RankFailure]] = dict
    ) -> None:
        self.member = member
        # What the last round came to on this rank, also where something ended its caller's wait; None where it failed.
        self.last_outcome: Outcome | None = None
        # What tells, in rounds to come, which other member will not be in them, and why; None where nothing does.
        self.missed: Callable[[], RankFailure | None] | None = None
        # Seconds after which a round that waits says for whom; None where it does not.
        self.warn_after: float | None = None
        self._name = unique_name(member.name, member.ranks)
        self._process = os.getpid()
        self._number = 0
        self._closed = False
        self._lost: Exception | None = None
        # Of the thread that went through the last round, or looked at one, and what it did.
        self._rounds: _Work | None = None
        self._last: Round | _Look | None = None
        self._one_round = threading.Lock()
        self._ballots = Ballots(member.ranks.index(member.rank), len(member.ranks))
        self._protocol = Protocol(member, node, f"votes/{self._name}", gone_before, self._ballots.offer)
        # Re-entrant: a second `close` does what Ctrl-C kept the first from.
        self._protocol_lock = threading.RLock()
        # A finaliser may come in the middle of a round, on its own thread.
        self._is_in_round = False

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks of this rank's node in the group's order; known after the first complete round."""
        return self._protocol.mates

    def gone(self) -> dict[int, RankFailure]:
        """The members of this rank's node that were found gone, also between rounds. On any thread."""
        return self._protocol.gone()

    @property
    def last_vote(self) -> VoteId:
        """Of the last round."""
        return VoteId(f"{self._name}-{self._number}", self._number)

    def skip_to(self, number: int) -> None:
        """Let the next round be this one, where it is yet to come."""
        with self._one_round:
            self._number = max(self._number, number)

    def hold(
        self,
        own: BaseException | None,
        what: str,
        seconds: float | None,
        *,
        same: str | None = None,
        brought: str | None = None,
        told: str | None = None,
        source: int | None = None,
        note: bool = False,
    ) -> Outcome:
        """Collective: the next round.

        `own`: this rank's error. `seconds`: how long to wait for the others, None for as long as it takes.
        `same`: what has to be equal on all ranks. `brought`: what the first member is to get of every rank; in
        the group's order it returns them, the others an empty list. `told`: what this rank tells whoever names it
        as their `source`. `note`: whether this rank notes something.
        """
        if self._closed:
            raise InvalidInputError(f"{what}: this voter is closed")
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"{what}: this voter was made before a fork: make one in the process that votes"
            )
        with self._one_round:
            now = time.monotonic()
            current = Round(
                number=self._number,
                what=what,
                own=None if own is None else RankFailure.of(self.member.rank, own),
                same=same,
                brought=brought,
                told=told,
                source=source,
                note=note,
                missed=self.missed,
                started=now,
                deadline=None if seconds is None else now + seconds,
                warn_after=self.warn_after,
            )
            # In one step as far as Ctrl-C sees.
            self._number, self.last_outcome = self._number + 1, None
            try:
                carried = (own, brought, told, source, self._lost)
                is_plain = self._protocol.is_tidy and not note and all(one is None for one in carried)
                self._ballots.decide(current, is_plain=is_plain, seconds=seconds)
                if current.went_well_beside_store:
                    self.last_outcome = Outcome(None)
                    return self.last_outcome
                self._hand_over(current)
                left = None if current.deadline is None else max(0.0, current.deadline - time.monotonic())
                answered = wait_for(current.done.wait, left)
                # All ranks come to it at their deadline, one after the other.
                part = _ANSWER_SECONDS * store_load_factor(len(self.member.ranks)) / _ANSWER_PARTS
                for _ in range(_ANSWER_PARTS):
                    answered = answered or current.done.wait(part)
                if not answered and current.verdict is not None:
                    answered = wait_for(current.done.wait, LINGER_SECONDS + _ANSWER_SECONDS)
                outcome = self._outcome_of(current, what)
            except BaseException as interruption:
                if current.went_well_beside_store:
                    self.last_outcome = Outcome(None)
                    raise
                current.interruption = RankFailure.of(self.member.rank, interruption)
                if self._last is not current:
                    # The others are to hear of it.
                    self._hand_over(current)
                wait_for(current.done.wait, _ANSWER_SECONDS)
                self._outcome_of(current, what)
                raise
        if outcome is not None:
            # It stands, even where the store was lost or stopped right after.
            return outcome
        if not answered:
            return Outcome(self._unanswered(what, seconds or 0.0))
        if current.trouble is not None:
            return Outcome(self._store_lost(what, current.trouble))
        raise InvalidInputError(f"{what}: this voter was closed during the vote")

    def _outcome_of(self, current: Round, what: str) -> Outcome | None:
        """What the verdict makes of a round; where there is none yet, the round is given up."""
        with current.lock:
            verdict = current.verdict
            current.abandoned = verdict is None
        if verdict is None:
            return None
        problem = verdict.error(what, self.member.rank, late=not current.posted)
        outcome = Outcome(problem, current.gathered, current.heard, verdict.is_noted)
        self.last_outcome = None if problem is not None else outcome
        return outcome

    def next_vote_fails(self, seconds: float) -> bool:
        """Whether it is known already, as far as the store tells within `seconds`, that the next round fails."""
        if self._closed:
            return True
        with self._one_round:
            look = self._last
            # What came of a look that took longer than it was waited for counts, too.
            is_told = isinstance(look, _Look) and look.number == self._number and look.is_lost
            if look is None or (look.done.has_come() and not is_told):
                look = _Look(self._number)
                self._hand_over(look)
        # What is left of a round that was left behind, the next one finds out.
        return isinstance(look, _Look) and look.done.wait(seconds) and look.is_lost

    def close(self) -> None:
        """Let go of sockets, the connection and the store; never waits."""
        self._closed = True
        # Whoever comes from now on gets another thread.
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.put(None)
        self._release_if_closed()

    def _hand_over(self, current: Round | _Look) -> None:
        """Give it to the thread of the last one, or to another where that one was left behind."""
        rounds = self._rounds
        if rounds is None or self._last is None or not self._last.done.has_come():
            if rounds is not None:
                rounds.put(None)
            # Not before its thread is there, which Ctrl-C may keep from coming.
            self._rounds = None
            rounds = queue.SimpleQueue()
            weakref.finalize(self, rounds.put, None).atexit = False
            Thread(_serve, "tundish-vote", (rounds,)).start()
            self._rounds = rounds
        # In one step as far as Ctrl-C sees.
        self._last = current
        rounds.put((self, current))
        if self._closed:
            # Perhaps just now, so that nobody serves it any more.
            rounds.put(None)
            current.done.come()

    def _release_if_closed(self) -> None:
        # A round in progress holds the lock; its thread comes here when it ends.
        if self._closed and self._protocol_lock.acquire(blocking=False):
            try:
                if not self._is_in_round:
                    self._ballots.let_go()
                    self._protocol.close()
            finally:
                self._protocol_lock.release()

    def _unanswered(self, what: str, seconds: float) -> TundishError:
        text, host = f"{what}: the job's store did not answer within {seconds:.4g} s", self._protocol.host
        if host is None:
            return VoteTimeoutError(f"{text}: look at the launcher that serves it", ())
        return VoteTimeoutError(f"{text}: rank {host}, which hosts it, is stopped or hung", (host,))

    def _store_lost(self, what: str, trouble: Exception) -> TundishError:
        host = self._protocol.host
        if host is None or host == self.member.rank:
            return StoreLostError(f"{what}: the job's store is gone or refuses ({trouble}): restart the job")
        return PeerFailedError(
            f"{what}: rank {host}, which hosts the job's store, was killed or vanished ({trouble})", host
        )

    # On the thread of the rounds.

    def _run(self, current: Round | _Look) -> None:
        try:
            with self._protocol_lock:
                if self._lost is not None:
                    raise self._lost
                if not self._closed:
                    self._is_in_round = True
                    self._go_through(current)
        except Exception as trouble:  # noqa: BLE001 (the caller has to hear of whatever ended the round)
            if isinstance(current, Round):
                self._lost = current.trouble = trouble
            else:
                # With what, the next round says.
                current.is_lost = True
        finally:
            self._is_in_round = False
            current.done.come()
            self._release_if_closed()

    def _go_through(self, current: Round | _Look) -> None:
        if isinstance(current, Round):
            is_first = not self._protocol.mates
            self._protocol.go_through(current)
            if is_first and self._protocol.mates == self.member.ranks:
                self._ballots.join(self._protocol.offered)
            elif is_first and self._protocol.mates:
                self._ballots.let_go()
        else:
            current.is_lost = self._protocol.is_lost(current.number)
