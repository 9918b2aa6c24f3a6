"""What a round of votes does in the job's store.

A `Protocol` owns a namespace of the store, a connection to it and a `PeerWatch`; one thread at a time goes through a
round with it, and may be held up by the store. Where all members are on one node and well, a round is decided beside
the store (`tundish.distributed.ballots`), which to the others is a number that was left out. The invariants of rounds
in the store:

1. A round has one end. Whoever finds that it is over (the last to arrive, a rank that saw a peer die or a
   deadline pass) writes the verdict with compare-and-set; the first one written is what every rank reads, so
   all ranks raise or none does.
2. A rank that comes late reads the verdict of the round it is late for, at once, and is in step again.
3. A round leaves one key, its verdict, which is deleted once all ranks were seen in a later one of these, and in any
   case after 16 more; the key `floor` tells a rank that comes later still. What ranks told one another in a round is
   deleted when all of them are in a later one.
4. The rank that hosts the store leaves a round last, so that it can exit right after.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from tundish.distributed.groups import GroupInfo
from tundish.distributed.jobstore import JobStore, store_host_rank
from tundish.distributed.tally import Tally
from tundish.distributed.verdict import RankFailure, Verdict
from tundish.distributed.vote_round import NOTE, Round
from tundish.distributed.watch import PeerWatch
from tundish.errors import ranks_named

__all__ = ["LINGER_SECONDS", "Protocol", "store_load_factor"]

_KEPT_ROUNDS = 16
# How long a failed rank waits for the others to bring their statuses too, so that all failures are named.
_GATHER_SECONDS = 0.5
# How long the host of the store stays in a round for the others to read its verdict, or to say that it came too late
# for them. Some ten exchanges with the store, each of which waits its turn on a machine that is overloaded. Who is
# known to be gone is not waited for.
LINGER_SECONDS = 5.0
# Each look at the store is a fifth later than the one before: what is waited for is seen soon, in proportion to how
# long it took, and a rank that waits long leaves its processor to those it waits for.
_FIRST_PAUSE = 0.0001
_GROWTH = 1.2
_LEAVING_PAUSE = 0.002
_SHORT_PAUSE = 0.02
_LONG_PAUSE = 0.1
# To conclude a round is to look at what the ranks brought. One rank does so, and the next one in line so much later,
# where that one was lost too: all of them at once would keep the store busy for hours. A store that stood still for a
# while as it was asked says nothing of how long that one takes, so the next one never waits much longer.
_TURN_SECONDS = 0.1
_LONGEST_TURN_SECONDS = 0.5
# Of statuses that tell of a failure. Where all ranks fail these are the lowest ones', and say what all say.
_MOST_READ = 64
# Ranks of whom the store serves whatever they ask without a thought.
_SMALL_CROWD = 256
# Of a text that has to be the same on all ranks, which every rank sends and gets back.
_LONGEST_SAME = 1000
# How often a rank that waits looks whether all are there after all, and in its first round who else came.
_LOOK_AROUND = 1.0
_LOOK_WHO_CAME = 0.25
# Ranks that a warning names.
_MOST_NAMED = 64

_logger = logging.getLogger("tundish.distributed")


def store_load_factor(ranks: int) -> float:
    """How many times longer so many ranks wait for the store than a few do, which it serves one after the other."""
    return max(1.0, ranks / _SMALL_CROWD)


class Protocol:
    """The rounds of one group, as `member` takes part in them, under `name` in the job's store.

    `node`: ranks that give the same name watch each other; they must share a kernel and a network namespace. `host`:
    the rank that serves the store, None where none does. `mates`: the ranks of this rank's node in the group's order,
    known after the first complete round; then `offered` is where they find what the first of them to come here made for
    all, with `offer`. `is_tidy`: the last round left nothing that the next one has to delete soon (the key by which the
    host of the store sees each rank leave stays until the next round in the store). `gone_before`: what tells, until
    the first complete round, which ranks of the job are gone: to one that was before it came here there is no
    connection.
    """

    def __init__(
        self,
        member: GroupInfo,
        node: str,
        name: str,
        gone_before: Callable[[], Mapping[int, RankFailure]],
        offer: Callable[[], Sequence[int] | None],
    ) -> None:
        self.member = member
        self.host = store_host_rank(member.store)
        self.mates: tuple[int, ...] = ()
        self.offered: Sequence[int] | None = None
        self.is_tidy = False
        self._node = node
        self._offer = offer
        self._gone_before = gone_before
        self._kept: list[int] = []
        self._introduction: str | None = None
        # Keys of this rank that others read in a round, with its number: deleted when all are in a later one.
        self._read: list[tuple[int, str]] = []
        self._about: dict[int, str] = {}
        self._acquainted = 0
        self._store = JobStore(member.store, name)
        self._watch = PeerWatch()

    def go_through(self, current: Round) -> None:
        """Take part in a round to its end; sets the verdict of `current`. Raises what the store fails with."""
        store, number, me = self._store, current.number, self.member.rank
        store.connect()
        self._introduce()
        verdict = self._verdict(number) or self._forgotten(number)
        if verdict is None and not current.abandoned:
            self._compare(current)
            if current.brought is not None:
                store.write(f"{number}/brought/{me}", current.brought)
            if current.told is not None:
                store.write(f"{number}/told/{me}", current.told)
            store.write(f"{number}/vote/{me}", current.status)
            current.posted = True
            tally = self._count(number, current.counted)
            if tally.arrived == len(self.member.ranks):
                verdict = self._conclude(current, {}, tally)
        if verdict is None:
            verdict = self._await(current)
        self._gather(current, verdict)
        self._pass_on(current, verdict)
        if verdict.complete and not self.mates:
            self._get_to_know()
            self.mates = tuple(rank for rank in self.member.ranks if rank in self._about)
            if self._introduction is not None:
                self._read.append((number, self._introduction))
        with current.lock:
            current.verdict = verdict
        self._tidy(current, verdict)
        # Who gave up before it could bring anything and was the first to say so is counted as present, too.
        is_counted = current.posted or (current.concluder and self.member.rank != self.host)
        if is_counted and self.host in self.member.ranks:
            self._leave(current, verdict)

    def is_lost(self, number: int) -> bool:
        """Whether the round of this `number`, which this rank has not begun, will not go well.

        It failed, a member is gone, or one that came to it failed or notes something. Raises as `go_through`.
        """
        if self._watch.vanished():
            return True
        self._store.connect()
        if self._verdict(number) is not None:
            return True
        # Not as `_count`, which would bring the key back where the round is over by now.
        tally = Tally.of(int(self._store.read(f"{number}/arrived") or "0"))
        return bool(tally.failed or tally.noted)

    def gone(self) -> dict[int, RankFailure]:
        """The members of this node that were found gone. On any thread."""
        return {rank: RankFailure(rank=rank, text=self._obituary(rank)) for rank in self._watch.vanished()}

    def close(self) -> None:
        """Let go of sockets, the connection and the store."""
        self._watch.close()
        self._store.close()

    def _compare(self, current: Round) -> None:
        """Fail where another rank brought something else that has to be the same."""
        if current.same is None or current.own is not None:
            return
        same = _brief(current.same)
        standing = self._store.write_once(f"{current.number}/same", same)
        if standing != same:
            text = f"brought {same!r} where another rank brought {standing!r}"
            current.own = RankFailure(rank=self.member.rank, text=text)

    def _gather(self, current: Round, verdict: Verdict) -> None:
        """Take what all ranks brought, on the first member; where the round failed, each takes its own back."""
        if current.brought is None:
            return
        own = f"{current.number}/brought/{self.member.rank}"
        if not verdict.complete or verdict.failures:
            self._store.delete(own)
            return
        self._read.append((current.number, own))
        if self.member.rank == self.member.ranks[0]:
            keys = [f"{current.number}/brought/{rank}" for rank in self.member.ranks]
            current.gathered = [text or "" for text in self._store.read_all(keys)]

    def _pass_on(self, current: Round, verdict: Verdict) -> None:
        """Take what this rank's source told; where the round failed, each takes its own back."""
        key, went_well = (
            f"{current.number}/told/{self.member.rank}",
            verdict.complete and not verdict.failures,
        )
        if current.told is not None and went_well:
            self._read.append((current.number, key))
        elif current.told is not None:
            self._store.delete(key)
        if current.source is not None and went_well:
            current.heard = self._store.read(f"{current.number}/told/{current.source}")

    def _introduce(self) -> None:
        """Once: say which node this rank is on and where it can be watched."""
        if self._introduction is not None:
            return
        position = self._store.add(f"node/{self._node}", 1)
        self._introduction = f"node/{self._node}/{position}"
        about = f"process {os.getpid()} on {socket.gethostname()}"
        offered = self._offer() if position == 1 else None
        text = json.dumps([self.member.rank, self._watch.address, about, offered])
        self._store.write(self._introduction, text)

    def _get_to_know(self) -> None:
        """Watch those of this node who introduced themselves since the last time."""
        addresses: dict[int, str] = {}
        for position in range(self._acquainted + 1, self._store.add(f"node/{self._node}", 0) + 1):
            text = self._store.read(f"node/{self._node}/{position}")
            if text is None:
                # About to be written, while not all are there.
                break
            rank, address, about, offered = json.loads(text)
            self.offered = self.offered or offered
            addresses[rank], self._about[rank], self._acquainted = address, about, position
        addresses.pop(self.member.rank, None)
        self._watch.connect(addresses)

    def _await(self, current: Round) -> Verdict:
        """Wait for the verdict, or reach it where this rank is the one to see that the round is over."""
        crowd = store_load_factor(len(self.member.ranks))
        between = (_LOOK_AROUND if self.mates else _LOOK_WHO_CAME) * crowd
        pause, next_look = _FIRST_PAUSE * crowd, current.started + between
        while True:
            self._watch.wait(pause)
            verdict = self._verdict(current.number)
            if verdict is None and time.monotonic() >= next_look:
                next_look = time.monotonic() + between
                self._look_around(current)
                verdict = self._forgotten(current.number)
            if verdict is not None:
                return verdict
            dead = self.gone()
            if not self.mates:
                known = self._gone_before()
                dead = {rank: known[rank] for rank in known if rank in self.member.ranks} | dead
            if self._is_over(current, dead) and self._is_in_turn(current):
                return self._verdict(current.number) or self._conclude(current, dead)
            pause = self._next_pause(current, pause)

    def _look_around(self, current: Round) -> None:
        """Find out what nobody tells a rank that waits."""
        if not self.mates:
            self._get_to_know()
        # The last to arrive may have died before it could write the verdict.
        current.are_all_there = self._count(current.number).arrived >= len(self.member.ranks)
        if current.warn_after is not None and time.monotonic() - current.started >= current.warn_after:
            self._tell_who_is_missing(current, current.warn_after)
            current.warn_after *= 2
        if current.missed is not None:
            current.absent = current.missed()

    def _is_over(self, current: Round, dead: Mapping[int, RankFailure]) -> bool:
        """Whether there is nobody more to wait for, or no more time."""
        now = time.monotonic()
        if current.are_all_there or dead or current.absent or current.interruption or current.abandoned:
            return True
        if current.deadline is not None and now >= current.deadline:
            return True
        # The others are given a moment to name their own failures.
        return current.own is not None and now >= current.started + _GATHER_SECONDS

    def _next_pause(self, current: Round, before: float) -> float:
        now = time.monotonic()
        longest = _SHORT_PAUSE if now < current.started + 2.0 else _LONG_PAUSE
        pause = min(before * _GROWTH, longest * store_load_factor(len(self.member.ranks)))
        return pause if current.turn is None else min(pause, max(_FIRST_PAUSE, current.turn - now))

    def _tell_who_is_missing(self, current: Round, seconds: float) -> None:
        """Say in the log of one of the ranks that wait so long for whom: it may be a call that not all make."""
        number = current.number
        key = f"{number}/waited/{seconds:g}"
        if self._store.add(key, 1) > 1:
            return
        self._read.append((number, key))
        votes = {f"{number}/vote/{rank}": rank for rank in self.member.ranks}
        missing = [votes[vote] for vote in self._store.missing(list(votes))]
        if missing:
            # A log that cannot be written must not end the round.
            with contextlib.suppress(Exception):
                _logger.warning(
                    "%s has waited %.4g s for %s: still at work, hung, or without this call, which all ranks make",
                    current.what,
                    seconds,
                    ranks_named(missing[:_MOST_NAMED], len(missing)),
                )

    def _is_in_turn(self, current: Round) -> bool:
        """Whether it is this rank's turn to conclude a round that is over."""
        if current.turn is None:
            now, crowd = time.monotonic(), store_load_factor(len(self.member.ranks))
            before = self._store.add(f"{current.number}/turns", 1) - 1
            # Whoever comes before asks about as much as it reads, of a store that may have much to do.
            asking = _MOST_READ * (time.monotonic() - now)
            turn = min(max(_TURN_SECONDS * crowd, asking), _LONGEST_TURN_SECONDS * crowd)
            current.turn = now + before * turn
        return time.monotonic() >= current.turn

    def _count(self, number: int, added: Tally = Tally()) -> Tally:  # noqa: B008 (it is never changed)
        """What is counted of a round, with what is added."""
        return Tally.of(self._store.add(f"{number}/arrived", added.number))

    def _conclude(
        self, current: Round, dead: Mapping[int, RankFailure], tally: Tally | None = None
    ) -> Verdict:
        """Write what this rank knows as the verdict; returns the one that was written first.

        `tally`: of the round, where all ranks are in it.
        """
        number, ranks = current.number, self.member.ranks
        missing: set[int] = set()
        if tally is None:
            # In this order: a rank is counted after its status is there.
            tally = self._count(number)
            votes = {f"{number}/vote/{rank}": rank for rank in ranks}
            missing = {votes[key] for key in self._store.missing(list(votes))}
        told, is_noted = self._statuses(current, tally, missing)
        # One that saw another one gone tells of that one.
        failures = {**dead, **{failure.rank: failure for failure in told.values()}}
        if current.absent is not None:
            failures.setdefault(current.absent.rank, current.absent)
        if current.interruption is not None:
            failures[self.member.rank] = current.interruption
        if current.abandoned:
            # The store could not be read in time; who else was silent cannot be told.
            missing = set() if self.host is None else {self.host}
        verdict = Verdict.bounded(
            complete=not (missing or dead or current.absent or current.interruption or current.abandoned),
            failures=list(failures.values()),
            failed_count=tally.failed,
            silent=[] if failures else sorted(missing),
            present_count=len(ranks) - len(missing | dead.keys()),
            is_noted=is_noted,
            seconds=time.monotonic() - current.started,
        )
        written = verdict.to_json()
        standing = self._store.write_once(f"{number}/verdict", written)
        current.concluder = standing == written
        return Verdict.from_json(standing)

    def _statuses(
        self, current: Round, tally: Tally, missing: set[int]
    ) -> tuple[dict[int, RankFailure], bool]:
        """What the ranks that are not `missing` brought: the failures of the lowest, and whether any noted something.

        No more failures than anybody is told of: where all fail, that is all that they bring.
        """
        there = [rank for rank in self.member.ranks if rank not in missing]
        is_noted = tally.noted > 0
        # The status of a rank can be there before the rank is counted.
        are_counted = tally.arrived >= len(there)
        if are_counted and not tally.failed:
            return {}, is_noted
        told: dict[int, RankFailure] = {}
        if current.posted and current.own is not None:
            told[self.member.rank] = current.own
        for rank in there:
            if len(told) >= _MOST_READ or (are_counted and len(told) >= tally.failed):
                break
            status = self._store.read(f"{current.number}/vote/{rank}")
            if status == NOTE:
                is_noted = True
            elif status:
                told[rank] = RankFailure.from_json(status)
        return told, is_noted

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

    def _tidy(self, current: Round, verdict: Verdict) -> None:
        """Delete what nobody will read again."""
        number, store = current.number, self._store
        if current.posted:
            store.delete(f"{number}/vote/{self.member.rank}")
        # In a round that was cut short, a rank between its look for the verdict and its vote can bring these
        # keys back after they were deleted; it is the one to delete them again.
        if current.turn is not None:
            store.delete(f"{number}/turns")
        if current.concluder or (current.posted and not verdict.complete):
            store.delete(f"{number}/arrived", f"{number}/same")
        if verdict.complete:
            store.delete(*(key for before, key in self._read if before < number))
            self._read = [(before, key) for before, key in self._read if before >= number]
        self._kept.append(number)
        count = 1 if verdict.complete else _KEPT_ROUNDS
        old, self._kept = self._kept[:-count], self._kept[-count:]
        if current.concluder and old:
            store.write("floor", str(old[-1] + 1))
            store.delete(*(f"{former}/verdict" for former in old))
        self.is_tidy = verdict.complete and not self._read

    def _leave(self, current: Round, verdict: Verdict) -> None:
        """The host of the store waits until the others have read the verdict; they tell it so.

        They also tell when it came too late for them: a host that was stopped can complete a round that
        nobody could read in time. It then has to raise as they did.
        """
        key, unread = f"{current.number}/left", f"{current.number}/unread"
        if self.member.rank != self.host:
            if current.abandoned and verdict.complete:
                self._store.write(unread, "yes")
            if not self.mates or self.host in self.mates:
                # Before it is counted: the host may see it end, and is not to count it once more.
                mine = f"{key}/{self.member.rank}"
                self._store.write(mine, "yes")
                self._read.append((current.number, mine))
            self._store.add(key, 1)
            return
        until, pause = time.monotonic() + LINGER_SECONDS, _FIRST_PAUSE
        # Of a round that was cut short those who were gone by then are not counted as present.
        gone_before: frozenset[int] = frozenset() if verdict.complete else self._watch.vanished()
        while time.monotonic() < until:
            left = self._store.add(key, 0)
            gone = self._watch.vanished() - gone_before
            unheard = [rank for rank in gone if self._store.read(f"{key}/{rank}") is None]
            if left + len(unheard) >= verdict.present_count - 1:
                break
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LEAVING_PAUSE)
        if verdict.complete and self._store.read(unread) is not None:
            with current.lock:
                current.verdict = Verdict(complete=False, silent=(self.member.rank,))
            self._store.delete(unread)
        self._store.delete(key)


def _brief(same: str) -> str:
    """What stands for `same` in the store, as long as a line and of characters that all stores take."""
    shown = same[: _LONGEST_SAME if len(same) <= _LONGEST_SAME else _LONGEST_SAME // 4]
    told = shown.encode(errors="backslashreplace").decode()
    if told == same:
        return same
    digest = hashlib.sha256(same.encode(errors="surrogatepass")).hexdigest()
    return f"{told} … ({len(same)} characters, sha256 {digest})"
