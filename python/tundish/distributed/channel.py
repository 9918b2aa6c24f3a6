"""The protocol of votes: rounds in the job's store, and the watch over the peers of this node.

A `Channel` owns a namespace of the store, a connection to it and a `PeerWatch`. Its invariants:

1. A round has one end. Whoever finds that it is over (the last to arrive, a rank that saw a peer die or a
   deadline pass) writes the verdict with compare-and-set; the first one written is what every rank reads, so
   all ranks raise or none does.
2. Every call to `hold` is the next round on its rank, whatever came of the former one. A rank that comes
   late reads the verdict of the round it is late for, at once, and is in step again.
3. The caller's thread never touches the store, which can block for as long as its host is stopped; a thread of the
   channel does, and a caller whose time is up leaves it behind. It ends when the store answers. One that is not left
   behind serves the next round too: an interpreter that is ending may start no threads any more, and still votes.
4. A round leaves one key, its verdict, which is deleted once all ranks were seen in a later round, and in any
   case after 16 more rounds; the key `floor` tells a rank that comes later still.
5. The rank that hosts the store leaves a round last, so that it can exit right after.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field

from tundish.distributed.groups import Membership, unused_name
from tundish.distributed.jobstore import JobStore, store_host_rank
from tundish.distributed.verdict import Failure, Outcome, Verdict
from tundish.distributed.watch import PeerWatch
from tundish.errors import InvalidInputError, PeerFailedError, StoreLostError, TundishError, VoteTimeoutError

__all__ = ["Channel"]

_KEPT_ROUNDS = 16
# How long a failed rank waits for the others to bring their statuses too, so that all failures are named.
_GATHER_SECONDS = 1.0
_LINGER_SECONDS = 2.0
# How long past its deadline a caller waits for the store to take in that the deadline passed.
_ANSWER_SECONDS = 1.0
# Each look at the store is a fifth later than the one before: what is waited for is seen soon, in proportion to how
# long it took, and a rank that waits long leaves its processor to those it waits for.
_FIRST_PAUSE = 0.0001
_GROWTH = 1.2
_LEAVING_PAUSE = 0.002
_SHORT_PAUSE = 0.02
_LONG_PAUSE = 0.1
# What a rank adds to the counter of a round, in one request: that it arrived, that it failed, that it notes something.
_ARRIVED = 1
_FAILED = 1 << 20
_NOTED = 1 << 40
# The status of a rank that is well and notes something.
_NOTE = "noted"


@dataclass(kw_only=True)
class _Round:
    """One vote of this rank. Its thread sets `verdict`, `gathered` and `done`, its caller the two flags.

    `lock` decides between a caller that gives up and a verdict that comes at that moment: the caller returns
    the verdict, or its thread sees `abandoned`.
    """

    number: int
    own: Failure | None
    same: str | None
    brought: str | None
    note: bool
    started: float
    deadline: float | None
    gathered: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    posted: bool = False
    verdict: Verdict | None = None
    concluder: bool = False
    trouble: Exception | None = None
    abandoned: bool = False
    interruption: Failure | None = None


# Rounds for one thread; None ends it.
_Rounds = queue.SimpleQueue["tuple[Channel, _Round] | None"]


def _serve(rounds: _Rounds) -> None:
    # Between rounds it holds no channel, so that one which nobody uses any more is let go of.
    while (work := rounds.get()) is not None:
        channel, current = work
        channel._run(current)
        del work, channel, current


class Channel:
    """Votes among the members of one group. All members make it, in the same order.

    `node`: ranks that give the same name watch each other and have one builder; they must share a kernel
    and a network namespace. `mates`: the ranks of this rank's node in the group's order, known after the
    first complete round.
    """

    def __init__(self, member: Membership, node: str) -> None:
        self.member = member
        self.mates: tuple[int, ...] = ()
        self._node = node
        self._process = os.getpid()
        self._number = 0
        self._kept: list[int] = []
        self._introduced = False
        # The key that says it, for as long as it is in the store.
        self._introduction: str | None = None
        self._about: dict[int, str] = {}
        self._closed = False
        self._lost: Exception | None = None
        # What the last round came to on this rank, also where something ended its caller's wait; None where it failed.
        self.agreed: Outcome | None = None
        # Of the thread that went through the last round, and that round.
        self._rounds: _Rounds | None = None
        self._last: _Round | None = None
        self._turn = threading.Lock()
        self._wire = threading.Lock()
        self._host = store_host_rank(member.store)
        self._store = JobStore(member.store, f"votes/{unused_name(member.name, member.ranks)}")
        self._watch = PeerWatch()

    def hold(
        self,
        own: BaseException | None,
        what: str,
        seconds: float | None,
        *,
        same: str | None = None,
        brought: str | None = None,
        note: bool = False,
    ) -> Outcome:
        """Collective: the next round.

        `own`: this rank's error. `seconds`: how long to wait for the others, None for as long as it takes.
        `same`: what has to be equal on all ranks. `brought`: what the first member is to get of every rank; in
        the group's order it returns them, the others an empty list. `note`: whether this rank notes something.
        """
        if self._closed:
            raise InvalidInputError(f"{what}: this voter is closed")
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"{what}: this voter was made before a fork: make one in the process that votes"
            )
        with self._turn:
            now = time.monotonic()
            current = _Round(
                number=self._number,
                own=None if own is None else Failure.of(self.member.rank, own),
                same=same,
                brought=brought,
                note=note,
                started=now,
                deadline=None if seconds is None else now + seconds,
            )
            self._number += 1
            try:
                self._hand_over(current)
                answered = current.done.wait(None if seconds is None else seconds + _ANSWER_SECONDS)
                if not answered and current.verdict is not None:
                    answered = current.done.wait(_LINGER_SECONDS + _ANSWER_SECONDS)
            except BaseException as interruption:
                current.interruption = Failure.of(self.member.rank, interruption)
                current.done.wait(_ANSWER_SECONDS)
                self._outcome_of(current, what)
                raise
        outcome = self._outcome_of(current, what)
        if outcome is not None:
            # It stands, even where the store was lost or stopped right after.
            return outcome
        if not answered:
            return Outcome(self._unanswered(what, seconds or 0.0), [])
        if current.trouble is not None:
            return Outcome(self._store_lost(what, current.trouble), [])
        raise InvalidInputError(f"{what}: this voter was closed during the vote")

    def _outcome_of(self, current: _Round, what: str) -> Outcome | None:
        """What the verdict makes of a round; where there is none yet, the round is given up."""
        with current.lock:
            verdict = current.verdict
            current.abandoned = verdict is None
        if verdict is None:
            return None
        problem = verdict.error(what, self.member.rank, late=not current.posted)
        outcome = Outcome(problem, current.gathered, verdict.is_noted)
        self.agreed = None if problem is not None else outcome
        return outcome

    def close(self) -> None:
        """Let go of sockets, the connection and the store; never waits."""
        self._closed = True
        if self._rounds is not None:
            self._rounds.put(None)
        self._release_if_closed()

    def _hand_over(self, current: _Round) -> None:
        """Give a round to the thread of the last one, or to another where that one was left behind."""
        if self._rounds is None or self._last is None or not self._last.done.is_set():
            if self._rounds is not None:
                self._rounds.put(None)
            self._rounds = queue.SimpleQueue()
            weakref.finalize(self, self._rounds.put, None).atexit = False
            threading.Thread(target=_serve, args=(self._rounds,), name="tundish-vote", daemon=True).start()
        self._last = current
        self._rounds.put((self, current))

    def _release_if_closed(self) -> None:
        # A round in progress holds the wire; its thread comes here when it ends.
        if self._closed and self._wire.acquire(blocking=False):
            try:
                self._watch.close()
                self._store.close()
            finally:
                self._wire.release()

    def _unanswered(self, what: str, seconds: float) -> TundishError:
        text = f"{what}: the job's store did not answer within {seconds:.4g} s"
        if self._host is None:
            return VoteTimeoutError(f"{text}: look at the launcher that serves it", ())
        return VoteTimeoutError(
            f"{text}: rank {self._host}, which hosts it, is stopped or hung", (self._host,)
        )

    def _store_lost(self, what: str, trouble: Exception) -> TundishError:
        if self._host is None or self._host == self.member.rank:
            return StoreLostError(f"{what}: the job's store is gone or refuses ({trouble}): restart the job")
        return PeerFailedError(
            f"{what}: rank {self._host}, which hosts the job's store, was killed or vanished ({trouble})",
            self._host,
        )

    # From here on everything runs on a round's thread, which holds the wire.

    def _run(self, current: _Round) -> None:
        try:
            with self._wire:
                if self._lost is not None:
                    raise self._lost
                self._go_through(current)
        except Exception as trouble:  # noqa: BLE001 (the caller has to hear of whatever ended the round)
            self._lost = current.trouble = trouble
        finally:
            current.done.set()
            self._release_if_closed()

    def _go_through(self, current: _Round) -> None:
        if self._closed:
            return
        store, number, me = self._store, current.number, self.member.rank
        store.connect()
        self._introduce()
        verdict = self._verdict(number) or self._forgotten(number)
        if verdict is None and not current.abandoned:
            self._compare(current)
            if current.brought is not None:
                store.write(f"{number}/brought/{me}", current.brought)
            store.write(f"{number}/vote/{me}", _status_of(current))
            current.posted = True
            told = _ARRIVED + (_FAILED if current.own is not None else _NOTED if current.note else 0)
            tally = store.add(f"{number}/arrived", told)
            if tally % _FAILED == len(self.member.ranks):
                verdict = self._conclude(current, tally=tally)
        if verdict is None:
            verdict = self._await(current)
        self._gather(current, verdict)
        met_before = bool(self.mates)
        if verdict.complete and not met_before:
            self._meet()
        with current.lock:
            current.verdict = verdict
        self._tidy(current, verdict)
        if verdict.complete and met_before and self._introduction is not None:
            # All ranks are past the round after which they read it.
            store.delete(self._introduction)
            self._introduction = None
        if current.posted and self._host in self.member.ranks:
            self._leave(current, verdict)

    def _compare(self, current: _Round) -> None:
        """Fail where another rank brought something else that has to be the same."""
        if current.same is None or current.own is not None:
            return
        standing = self._store.write_once(f"{current.number}/same", current.same)
        if standing != current.same:
            text = f"brought {current.same!r} where another rank brought {standing!r}"
            current.own = Failure(rank=self.member.rank, text=text)

    def _gather(self, current: _Round, verdict: Verdict) -> None:
        """Take what all ranks brought, on the first member; where the round failed, each takes its own back."""
        if current.brought is None:
            return
        keys = [f"{current.number}/brought/{rank}" for rank in self.member.ranks]
        if not verdict.complete or verdict.failures:
            self._store.delete(f"{current.number}/brought/{self.member.rank}")
        elif self.member.rank == self.member.ranks[0]:
            current.gathered = [self._store.read(key) or "" for key in keys]
            self._store.delete(*keys)

    def _introduce(self) -> None:
        """Once: say which node this rank is on and where it can be watched."""
        if self._introduced:
            return
        self._introduced = True
        position = self._store.add(f"node/{self._node}", 1)
        self._introduction = f"node/{self._node}/{position}"
        about = f"process {os.getpid()} on {socket.gethostname()}"
        self._store.write(self._introduction, json.dumps([self.member.rank, self._watch.address, about]))

    def _meet(self) -> None:
        """Once, when all have introduced themselves: watch the others of this node."""
        addresses: dict[int, str] = {}
        for position in range(1, self._store.add(f"node/{self._node}", 0) + 1):
            rank, address, about = json.loads(self._store.read(f"node/{self._node}/{position}") or "[]")
            addresses[rank] = address
            self._about[rank] = about
        self.mates = tuple(rank for rank in self.member.ranks if rank in addresses)
        del addresses[self.member.rank]
        self._watch.connect(addresses)

    def _await(self, current: _Round) -> Verdict:
        """Wait for the verdict, or reach it where this rank is the one to see that the round is over."""
        crowd = max(1.0, len(self.member.ranks) / 256)  # the store serves every rank's polling
        pause, look_around = _FIRST_PAUSE * crowd, current.started + 1.0
        while True:
            self._watch.wait(pause)
            verdict = self._verdict(current.number)
            if verdict is not None:
                return verdict
            now = time.monotonic()
            dead = self._watch.vanished()
            if dead or current.interruption is not None or current.abandoned:
                return self._conclude(current, dead=dead)
            if current.deadline is not None and now >= current.deadline:
                return self._conclude(current)
            if current.own is not None and now >= current.started + _GATHER_SECONDS:
                return self._conclude(current)
            if now >= look_around:
                look_around = now + 1.0
                # The last to arrive may have died before it could write the verdict.
                tally = self._store.add(f"{current.number}/arrived", 0)
                if tally % _FAILED >= len(self.member.ranks):
                    return self._conclude(current, tally=tally)
                verdict = self._forgotten(current.number)
                if verdict is not None:
                    return verdict
            longest = _SHORT_PAUSE if now < current.started + 2.0 else _LONG_PAUSE
            pause = min(pause * _GROWTH, longest * crowd)

    def _conclude(
        self, current: _Round, *, tally: int | None = None, dead: frozenset[int] = frozenset()
    ) -> Verdict:
        """Write what this rank knows as the verdict; returns the one that was written first.

        `tally`: of the round, where all ranks are in it.
        """
        number, store = current.number, self._store
        votes = {f"{number}/vote/{rank}": rank for rank in self.member.ranks}
        missing: set[int] = set()
        if tally is None:
            # In this order: a rank is counted after its status is there.
            tally = store.add(f"{number}/arrived", 0)
            missing = {votes[key] for key in store.missing(list(votes))}
        is_noted = tally >= _NOTED
        failures = {rank: Failure(rank=rank, text=self._obituary(rank)) for rank in dead}
        # The status of a rank can be there before the rank is counted.
        if tally % _NOTED >= _FAILED or tally % _FAILED < len(votes) - len(missing):
            for key, rank in votes.items():
                status = None if rank in missing else store.read(key)
                if status == _NOTE:
                    is_noted = True
                elif status:
                    failures[rank] = Failure.from_json(status)
        if current.interruption is not None:
            failures[self.member.rank] = current.interruption
        if current.abandoned:
            # The store could not be read in time; who else was silent cannot be told.
            missing = set() if self._host is None else {self._host}
        verdict = Verdict.bounded(
            complete=not (missing or dead or current.interruption or current.abandoned),
            failures=list(failures.values()),
            silent=[] if failures else sorted(missing),
            present=len(votes) - len(missing | dead),
            is_noted=is_noted,
            seconds=time.monotonic() - current.started,
        )
        written = verdict.to_json()
        standing = store.write_once(f"{number}/verdict", written)
        current.concluder = standing == written
        return Verdict.from_json(standing)

    def _obituary(self, rank: int) -> str:
        about = self._about.get(rank)
        return ("" if about is None else f"({about}) ") + "was killed or vanished"

    def _verdict(self, number: int) -> Verdict | None:
        text = self._store.read(f"{number}/verdict")
        return None if text is None else Verdict.from_json(text)

    def _forgotten(self, number: int) -> Verdict | None:
        """For a round whose verdict was deleted since: what it came to for a rank this far behind."""
        if int(self._store.read("floor") or "0") <= number:
            return None
        return Verdict(complete=False, silent=(self.member.rank,))

    def _tidy(self, current: _Round, verdict: Verdict) -> None:
        """Delete what nobody will read again."""
        number, store = current.number, self._store
        if current.posted:
            store.delete(f"{number}/vote/{self.member.rank}")
        # In a round that was cut short, a rank between its look for the verdict and its vote can bring these
        # keys back after they were deleted; it is the one to delete them again.
        if current.concluder or (current.posted and not verdict.complete):
            store.delete(f"{number}/arrived", f"{number}/same")
        self._kept.append(number)
        count = 1 if verdict.complete else _KEPT_ROUNDS
        old, self._kept = self._kept[:-count], self._kept[-count:]
        if current.concluder and old:
            store.write("floor", str(old[-1] + 1))
            store.delete(*(f"{former}/verdict" for former in old))

    def _leave(self, current: _Round, verdict: Verdict) -> None:
        """The host of the store waits until the others have read the verdict; they tell it so.

        They also tell when it came too late for them: a host that was stopped can complete a round that
        nobody could read in time. It then has to raise as they did.
        """
        key, unread = f"{current.number}/left", f"{current.number}/unread"
        if self.member.rank != self._host:
            if current.abandoned and verdict.complete:
                self._store.write(unread, "yes")
            self._store.add(key, 1)
            return
        until, pause = time.monotonic() + _LINGER_SECONDS, _FIRST_PAUSE
        gone_before = self._watch.vanished()
        while time.monotonic() < until:
            gone_since = self._watch.vanished() - gone_before
            if self._store.add(key, 0) + len(gone_since) >= verdict.present - 1:
                break
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LEAVING_PAUSE)
        if verdict.complete and self._store.read(unread) is not None:
            with current.lock:
                current.verdict = Verdict(complete=False, silent=(self.member.rank,))
            self._store.delete(unread)
        self._store.delete(key)


def _status_of(current: _Round) -> str:
    if current.own is not None:
        return current.own.to_json()
    return _NOTE if current.note else ""
