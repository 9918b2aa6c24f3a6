"""Holds votes in the job's store, so that all ranks read the same result.

Every rank writes its status and increments a counter. The last to arrive, or a rank that sees a peer die or the
deadline pass, writes the result with compare-and-set. All ranks read the first result written, so all raise or none
does. A late rank reads the missed result, then continues with the next vote.
A result is JSON of bounded size, for any number of failed ranks and any length of their errors.

Invariants:

1. In a complete vote every rank took part, so no rank reads keys of earlier votes any more. They are deleted.
2. The rank that hosts the store leaves a vote last, so that it can exit right after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tundish.distributed.job_store import JobStore, store_host_rank, store_load_factor
from tundish.distributed.peer_watch import PeerWatch
from tundish.distributed.process_groups import GroupInfo
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    JobStoreLostError,
    PeerFailedError,
    TundishError,
    VoteTimeoutError,
    format_ranks,
    format_type,
)

# How long a failed rank waits for the failures of others, so that all are named.
_GATHER_SECONDS = 0.5
# How long the host of the store stays in a vote for the others to read its result.
LINGER_SECONDS = 5.0
# A rank pauses for a tenth of the time that it has waited before it looks for the result, within these bounds.
_SHORTEST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.1
# One rank writes the result. If it dies, the next in line writes it after this time.
_TURN_SECONDS = 0.5
# The result contains so many failures: the first ones that were reported.
_MAX_FAILURES = 64
# The largest value that torch's store server takes, in bytes.
_MAX_TEXT_BYTES = 8 << 20
# How often a waiting rank checks whether all have arrived and, in its first vote, looks for ranks of its node.
_CHECK_SECONDS = 1.0
_FIRST_VOTE_CHECK_SECONDS = 0.25
# How many ranks a warning names.
_MAX_WARNED = 64

_logger = logging.getLogger("tundish.distributed")


@dataclass(kw_only=True)
class RankVote:
    """One vote of this rank.

    Attributes:
        failure: this rank's failure.
        same: a text that has to be equal on all ranks.
        value: a text that this rank sends to others.
        gathers: whether the group's first rank gets the values of all.
        source: the rank whose value this rank gets.
        combine: makes one text, which all ranks get, from the values of all.
        flag: this rank's flag.
        work: runs elsewhere and may wait for other ranks; this rank has voted when it is done.
        warn_after: seconds after which one rank logs which ranks it waits for; doubled after each warning.
        interruption: set by the caller's thread: what interrupted it.
        abandoned: set by the caller's thread: it stopped waiting.
        result, values, received: set by the thread that holds the vote: the result, the values of all ranks, and the
            value of `source` or the combined one.
        posted: set by the thread that holds the vote: this rank reported its status in time.
        lock: held to stop waiting and to set the result.
    """

    number: int
    what: str
    failure: RankFailure | None = None
    same: str | None = None
    value: str | None = None
    gathers: bool = False
    source: int | None = None
    combine: Callable[[list[str]], str] | None = None
    flag: bool = False
    work: Future[Any] | None = None
    warn_after: float | None = None
    started: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    interruption: RankFailure | None = None
    abandoned: bool = False
    result: VoteResult | None = None
    values: list[str] = field(default_factory=list)
    received: str | None = None
    posted: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class VoteProtocol:
    """One member's part in the votes of a group in the job's store. One thread at a time may use it.

    Args:
        member: the group.
        node: the name of this rank's node. Ranks with the same name watch each other.
        name: the namespace of the group's keys.
        known_losses: returns the lost ranks that other voters know of; called until the first complete vote.

    Attributes:
        host: the rank that serves the store, None where no rank does.
        node_ranks: the ranks of this rank's node in the group's order, known after the first complete vote.
    """

    def __init__(
        self,
        member: GroupInfo,
        node: str,
        name: str,
        known_losses: Callable[[], Mapping[int, RankFailure]],
    ) -> None:
        self.host = store_host_rank(member.store)
        self.node_ranks: tuple[int, ...] = ()
        self._rank, self._ranks = member.rank, member.ranks
        self._load = store_load_factor(len(member.ranks))
        self._node = node
        self._known_losses = known_losses
        # Keys to delete once all ranks are in a later vote: of this rank, with the vote's number, and of all ranks.
        self._own_keys: list[tuple[int, str]] = []
        self._common_keys: list[str] = []
        self._introduction = ""
        self._processes: dict[int, str] = {}
        self._known_positions = 0
        self._store = JobStore(member.store, name)
        self._watch = PeerWatch()

    def hold(self, vote: RankVote) -> None:
        """Take part in `vote` and set its result. Raises the errors of the store."""
        store, number = self._store, vote.number
        store.connect()
        self._introduce()
        is_last, turn = False, None
        result = self._read_result(number)
        if result is None and not vote.abandoned:
            is_last = self._post(vote) == len(self._ranks)
            if is_last:
                result = self._write_result(vote, {}, all_arrived=True)
        if result is None:
            result, turn = self._wait(vote)
        self._pass_values(vote, result)
        if result.complete and not self.node_ranks:
            self._watch_new_ranks()
            self.node_ranks = tuple(rank for rank in self._ranks if rank in self._processes)
            self._own_keys.append((number, self._introduction))
        with vote.lock:
            vote.result = result
        self._clean_up(vote, result, deletes_common=is_last or turn == 0)
        if vote.posted and self.host in self._ranks:
            self._leave(vote, result)

    def fail(self, number: int, failure: RankFailure) -> None:
        """Fail vote `number` on all ranks; this rank does not take part in it."""
        self._store.connect()
        result = VoteResult(complete=False, failures=(failure,), failed_count=1)
        self._store.write_once(f"{number}/result", result.to_json())

    def lost(self) -> dict[int, RankFailure]:
        """The failure of each member of this node that is gone. For any thread."""
        return {rank: RankFailure(rank=rank, text=self._loss_of(rank)) for rank in self._watch.vanished()}

    def close(self) -> None:
        """Release sockets, the connection and the store."""
        self._watch.close()
        self._store.close()

    def _post(self, vote: RankVote) -> int:
        """Report this rank's status; return how many ranks have reported theirs.

        If the vote ends before this rank's work, its status is not reported.
        """
        store, key = self._store, f"{vote.number}"
        if vote.same is not None and vote.failure is None:
            same = shortened(vote.same)
            other, _, first = store.write_once(f"{key}/same", f"{self._rank} {same}").partition(" ")
            if first != same:
                text = difference(same, first, other)
                vote.failure = RankFailure(rank=self._rank, text=text)
        if vote.value is not None:
            store.write(f"{key}/value/{self._rank}", vote.value)
        if vote.work is not None and vote.failure is None:
            # Counts as there before its work ends, so that others name only ranks that are missing.
            store.write(f"{key}/vote/{self._rank}", "")
            vote.posted = True
            if not self._wait_for_work(vote, vote.work):
                return store.add(f"{key}/arrived", 0)
        # Before the rank is counted, so that the last one to be counted knows of every failure.
        if vote.failure is not None:
            position = store.add(f"{key}/failed", 1)
            store.write(f"{key}/failure/{position}", vote.failure.to_json())
            self._own_keys.append((vote.number, f"{key}/failure/{position}"))
        elif vote.flag:
            store.add(f"{key}/flagged", 1)
        store.write(f"{key}/vote/{self._rank}", "")
        vote.posted = True
        return store.add(f"{key}/arrived", 1)

    def _wait_for_work(self, vote: RankVote, work: Future[Any]) -> bool:
        """Wait for `work`. Returns False if the vote is over before it is done."""
        started, failed_at = time.monotonic(), math.inf
        while not (work.done() and work.exception() is None):
            now = time.monotonic()
            if work.done():
                # It may have failed because another rank is gone, which others notice.
                failed_at = min(failed_at, now)
                if now >= failed_at + _GATHER_SECONDS:
                    vote.failure = RankFailure.of(self._rank, work.exception() or RuntimeError())
                    return True
            if self.lost() or self._is_out_of_time(vote) or self._read_result(vote.number) is not None:
                return False
            self._watch.wait(min(max((now - started) / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE) * self._load)
        return True

    def _wait(self, vote: RankVote) -> tuple[VoteResult, int | None]:
        """Wait for the result, or write it if this rank sees that the vote is over.

        Returns the result and, if it saw that, this rank's place in the line of ranks that may write.
        """
        check_seconds = (_CHECK_SECONDS if self.node_ranks else _FIRST_VOTE_CHECK_SECONDS) * self._load
        next_check, turn, turn_at = vote.started + check_seconds, None, 0.0
        is_over = False
        while True:
            waited = time.monotonic() - vote.started
            self._watch.wait(min(max(waited / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE) * self._load)
            result = self._read_result(vote.number)
            if result is not None:
                return result, turn
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + check_seconds
                is_over = self._check(vote) or is_over
            lost = self.lost()
            if not self.node_ranks:
                known = self._known_losses()
                lost = {rank: known[rank] for rank in known if rank in self._ranks} | lost
            if not (is_over or lost or self._is_out_of_time(vote)):
                continue
            if turn is None:
                turns = f"{vote.number}/turns"
                turn = self._store.add(turns, 1) - 1
                self._own_keys.append((vote.number, turns))
                turn_at = time.monotonic() + turn * _TURN_SECONDS * self._load
            if time.monotonic() >= turn_at:
                return self._read_result(vote.number) or self._write_result(vote, lost), turn

    def _check(self, vote: RankVote) -> bool:
        """Watch new ranks of the node, warn, and return whether all ranks have arrived."""
        if not self.node_ranks:
            self._watch_new_ranks()
        if vote.warn_after is not None and time.monotonic() - vote.started >= vote.warn_after:
            self._warn(vote, vote.warn_after)
            vote.warn_after *= 2
        # The last to arrive may have died before it could write the result.
        return self._store.add(f"{vote.number}/arrived", 0) >= len(self._ranks)

    def _is_out_of_time(self, vote: RankVote) -> bool:
        now = time.monotonic()
        if (
            vote.interruption is not None
            or vote.abandoned
            or (vote.deadline is not None and now >= vote.deadline)
        ):
            return True
        return vote.failure is not None and now >= vote.started + _GATHER_SECONDS

    def _warn(self, vote: RankVote, seconds: float) -> None:
        """Log, on one rank, which ranks the vote waits for."""
        key = f"{vote.number}/warned/{seconds:g}"
        if self._store.add(key, 1) > 1:
            return
        self._own_keys.append((vote.number, key))
        missing = self._missing(vote.number)
        if missing:
            # A log that cannot be written does not fail the vote.
            with contextlib.suppress(Exception):
                _logger.warning(
                    "%s has waited %.4g s for %s: slow, hung, or missing this collective call",
                    vote.what,
                    seconds,
                    format_ranks(missing[:_MAX_WARNED], len(missing)),
                )

    def _missing(self, number: int) -> list[int]:
        """The ranks that have not reported their status, in the group's order."""
        ranks = {f"{number}/vote/{rank}": rank for rank in self._ranks}
        return [ranks[key] for key in self._store.missing(list(ranks))]

    def _write_result(
        self, vote: RankVote, lost: Mapping[int, RankFailure], *, all_arrived: bool = False
    ) -> VoteResult:
        """Write the result as this rank knows it, unless the store has one; return the stored one."""
        store, number = self._store, vote.number
        missing = set() if all_arrived else set(self._missing(number))
        failed = int(store.read(f"{number}/failed") or "0")
        failures = dict(lost)
        for position in range(1, min(failed, _MAX_FAILURES) + 1):
            text = store.read(f"{number}/failure/{position}")
            if text is not None:
                failure = RankFailure.from_json(text)
                failures[failure.rank] = failure
        if vote.interruption is not None:
            failures[self._rank] = vote.interruption
        is_complete = not (missing or lost or vote.interruption or vote.abandoned)
        if vote.work is not None and is_complete and not all_arrived:
            # A rank is there before its work is done.
            is_complete = self._store.add(f"{number}/arrived", 0) >= len(self._ranks)
            if not is_complete and not failures:
                failures[self._rank] = RankFailure(rank=self._rank, text="did not finish in time")
        if vote.combine is not None and is_complete and not failures:
            try:
                text = vote.combine(self._values(number))
                refusal = check_size(text, vote.what)
                if refusal is not None:
                    raise refusal
                store.write(f"{number}/combined", text)
            except Exception as error:  # noqa: BLE001 (all ranks raise it)
                failures[self._rank] = RankFailure.of(self._rank, error)
        silent = sorted(missing)
        if vote.abandoned:
            # The store did not answer in time, so nothing is known of other ranks.
            silent = [] if self.host is None else [self.host]
        result = VoteResult.bounded(
            complete=is_complete,
            failures=list(failures.values()),
            failed_count=failed,
            silent=[] if failures else silent,
            present_count=len(self._ranks) - len(missing | lost.keys()),
            flagged=int(store.read(f"{number}/flagged") or "0") > 0,
            seconds=time.monotonic() - vote.started,
        )
        return VoteResult.from_json(store.write_once(f"{number}/result", result.to_json()))

    def _read_result(self, number: int) -> VoteResult | None:
        text = self._store.read(f"{number}/result")
        return None if text is None else VoteResult.from_json(text)

    def _pass_values(self, vote: RankVote, result: VoteResult) -> None:
        """Read the values for this rank after a successful vote."""
        if vote.value is not None:
            self._own_keys.append((vote.number, f"{vote.number}/value/{self._rank}"))
        if not result.succeeded:
            return
        if vote.gathers and self._rank == self._ranks[0]:
            vote.values = self._values(vote.number)
        if vote.combine is not None:
            vote.received = self._store.read(f"{vote.number}/combined")
        if vote.source is not None:
            vote.received = self._store.read(f"{vote.number}/value/{vote.source}")

    def _values(self, number: int) -> list[str]:
        """The values of all ranks, in the group's order."""
        return [
            text or "" for text in self._store.read_all([f"{number}/value/{rank}" for rank in self._ranks])
        ]

    def _introduce(self) -> None:
        """Write, once, this rank's entry in the list of its node, with the address to watch it."""
        if self._introduction:
            return
        position = self._store.add(f"node/{self._node}", 1)
        self._introduction = f"node/{self._node}/{position}"
        process = f"process {os.getpid()} on {socket.gethostname()}"
        self._store.write(self._introduction, json.dumps([self._rank, self._watch.address, process]))

    def _watch_new_ranks(self) -> None:
        """Watch the ranks of this node that were added to its list since the last call."""
        addresses: dict[int, str] = {}
        for position in range(self._known_positions + 1, self._store.add(f"node/{self._node}", 0) + 1):
            text = self._store.read(f"node/{self._node}/{position}")
            if text is None:
                # The rank is about to write it.
                break
            rank, address, process = json.loads(text)
            addresses[rank], self._processes[rank], self._known_positions = address, process, position
        addresses.pop(self._rank, None)
        self._watch.connect(addresses)

    def _loss_of(self, rank: int) -> str:
        process = self._processes.get(rank)
        return ("" if process is None else f"({process}) ") + "was killed or vanished"

    def _clean_up(self, vote: RankVote, result: VoteResult, *, deletes_common: bool) -> None:
        """Delete keys that no rank reads again; one rank deletes the keys common to all."""
        store, number = self._store, vote.number
        if vote.posted:
            store.delete(f"{number}/vote/{self._rank}")
        if result.complete:
            store.delete(*(key for held, key in self._own_keys if held < number))
            self._own_keys = [(held, key) for held, key in self._own_keys if held >= number]
            if deletes_common:
                store.delete(*self._common_keys)
            self._common_keys = []
        common = ["result", "arrived", "left"]
        common += ["same"] * (vote.same is not None) + ["flagged"] * result.flagged
        common += ["failed"] * (result.failed_count > 0) + ["combined"] * (vote.combine is not None)
        self._common_keys += [f"{number}/{key}" for key in common]

    def _leave(self, vote: RankVote, result: VoteResult) -> None:
        """Have the host of the store wait until the others have read the result.

        A host that was stopped may complete a vote that the others gave up. They tell it, and it raises as they did.
        """
        left, unread = f"{vote.number}/left", f"{vote.number}/unread"
        if self._rank != self.host:
            if vote.abandoned and result.complete:
                self._store.write(unread, "yes")
            # Before it is counted, so that the host does not count it again when it sees this rank end.
            self._store.write(f"{left}/{self._rank}", "yes")
            self._own_keys.append((vote.number, f"{left}/{self._rank}"))
            self._store.add(left, 1)
            return
        until, pause = time.monotonic() + LINGER_SECONDS, _SHORTEST_PAUSE
        # A result that is not complete counts the ranks that were gone by then as absent.
        gone_before: frozenset[int] = frozenset() if result.complete else self._watch.vanished()
        while time.monotonic() < until:
            gone = self._watch.vanished() - gone_before
            unread_by = [rank for rank in gone if self._store.read(f"{left}/{rank}") is None]
            if self._store.add(left, 0) + len(unread_by) >= result.present_count - 1:
                break
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE / 10)
        if result.complete and self._store.read(unread) is not None:
            with vote.lock:
                vote.result = VoteResult(complete=False, silent=(self._rank,))
            self._store.delete(unread)


def as_exception(error: Any, what: str) -> BaseException | None:
    """`error` itself, or an error about it if it is no exception."""
    if error is None or isinstance(error, BaseException):
        return error
    return InvalidTypeError(f"{what}: error is {format_type(error)}: give an exception, or None for success")


def check_same(same: Any, what: str) -> TundishError | None:
    """The error of a bad `same`. It is voted on, because a computed text may be bad on one rank only."""
    if not isinstance(same, str):
        return InvalidTypeError(f"{what}: same is {format_type(same)}: give a string")
    if not same:
        return InvalidInputError(f"{what}: an empty text was given as same; give what to compare")
    return None


def check_size(text: str | None, what: str) -> TundishError | None:
    """The error of a text for which the store would close the connection that all voters of the process share."""
    try:
        size = 0 if text is None else len(text.encode())
    except UnicodeEncodeError as error:
        return InvalidInputError(f"{what}: a text was given that is no Unicode ({error}): give it as JSON")
    if size <= _MAX_TEXT_BYTES:
        return None
    return InvalidInputError(
        f"{what}: a text of {size} bytes was given, and the job's store takes no more than {_MAX_TEXT_BYTES}: share "
        "large data in another way"
    )


def no_result_error(
    what: str, rank: int, host: int | None, task: Future[Any], seconds: float | None
) -> TundishError:
    """The error of a vote without a result on this `rank`: its `task` failed, or the store did not answer in time."""
    if not task.done():
        text = f"{what}: the job's store did not answer within {seconds or 0.0:.4g} s"
        if host is None:
            return VoteTimeoutError(f"{text}: look at the launcher that serves it", ())
        return VoteTimeoutError(f"{text}: rank {host}, which hosts it, is stopped or hung", (host,))
    trouble = task.exception()
    if isinstance(trouble, InvalidInputError):
        return trouble
    if host is None or host == rank:
        return JobStoreLostError(f"{what}: the job's store is gone or refuses ({trouble}): restart the job")
    return PeerFailedError(
        f"{what}: rank {host}, which hosts the job's store, was killed or vanished ({trouble})", host
    )


_MAX_CHARACTERS = 2000
_MAX_DETAILED = 8
_MAX_NAMED = 256
# Characters that are shown of a compared text, and of one argument in it.
_MAX_COMPARED = 1000
_MAX_ARGUMENT = 250


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The failure of one rank.

    Attributes:
        rank: its global rank.
        text: its error, or how it was lost: "failed with OSError: …", "was killed or vanished".
    """

    rank: int
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """The failure of `rank` with `error`, its text shortened; of a `LostPeerError` the lost peer's failure."""
        if isinstance(error, LostPeerError):
            return error.failure
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 (an error that cannot be printed is still a failure)
            text = "(its message cannot be printed)"
        text = f"failed with {type(error).__name__}" + (f": {text}" if text else "")
        if len(text) > _MAX_CHARACTERS:
            text = text[:_MAX_CHARACTERS] + f" … ({len(text) - _MAX_CHARACTERS} characters more)"
        return cls(rank=rank, text=text)

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankFailure:
        """The failure with this JSON form."""
        return cls(**json.loads(text))


class LostPeerError(PeerFailedError):
    """Another rank was lost. Brought to a vote, it counts as the failure of that rank."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(f"rank {failure.rank} {failure.text}", failure.rank)
        self.failure = failure


@dataclass(frozen=True, kw_only=True)
class VoteResult:
    """The one result of a vote. At most the lowest 256 ranks are named.

    Attributes:
        complete: whether every rank reported its status.
        failures: the lowest ranks that failed or died, ascending, with their errors.
        also_failed: the ranks of further failures, without their errors.
        failed_count: the number of all failures, including those that are not named.
        silent: ranks that had not voted by the deadline.
        silent_count: the number of all silent ranks.
        present_count: ranks, still alive, that had voted.
        flagged: whether a rank set its flag.
        seconds: how long the silent ranks were waited for.
    """

    complete: bool
    failures: tuple[RankFailure, ...] = ()
    also_failed: tuple[int, ...] = ()
    failed_count: int = 0
    silent: tuple[int, ...] = ()
    silent_count: int = 0
    present_count: int = 0
    flagged: bool = False
    seconds: float = 0.0

    @classmethod
    def bounded(
        cls, *, failures: Sequence[RankFailure], failed_count: int, silent: Sequence[int], **fields: object
    ) -> VoteResult:
        """A result of bounded size: only the lowest ranks keep their errors. `failed_count` is a lower bound."""
        ordered = sorted(failures, key=lambda failure: failure.rank)[:_MAX_NAMED]
        return cls(
            failures=tuple(ordered[:_MAX_DETAILED]),
            also_failed=tuple(failure.rank for failure in ordered[_MAX_DETAILED:]),
            failed_count=max(failed_count, len(failures)),
            silent=tuple(sorted(silent)[:_MAX_NAMED]),
            silent_count=len(silent),
            **fields,  # type: ignore[arg-type]
        )

    @property
    def succeeded(self) -> bool:
        """Whether every rank brought a good status."""
        return self.complete and not self.failures

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps({**vars(self), "failures": [vars(failure) for failure in self.failures]})

    @classmethod
    def from_json(cls, text: str) -> VoteResult:
        """The result with this JSON form."""
        fields = json.loads(text)
        fields["failures"] = tuple(RankFailure(**failure) for failure in fields["failures"])
        fields["also_failed"] = tuple(fields["also_failed"])
        fields["silent"] = tuple(fields["silent"])
        return cls(**fields)

    def error(self, what: str, rank: int, *, late: bool) -> TundishError | None:
        """The error that `rank` raises after the vote on `what`; None where all ranks are well.

        `late`: the vote had ended when `rank` came to it.
        """
        if self.failures:
            text = "; ".join(f"rank {failure.rank} {failure.text}" for failure in self.failures)
            others = self.failed_count - len(self.failures)
            if others > 0:
                text += f"; {format_ranks(self.also_failed, others)} failed too"
            return PeerFailedError(f"{what}: {text}", self.failures[0].rank)
        if self.complete:
            return None
        if late or rank in self.silent:
            return VoteTimeoutError(
                f"{what}: rank {rank} came to this vote after the others had given up waiting for it: it was "
                "slower than their timeout, or stopped. They raised too, so all can go on with the next vote",
                (rank,),
            )
        if not self.silent:
            return VoteTimeoutError(f"{what}: the job's store did not answer another rank in time", ())
        names = format_ranks(self.silent, self.silent_count)
        return VoteTimeoutError(
            f"{what}: {names} did not vote within {self.seconds:.4g} s. They hang, were stopped, or are elsewhere in "
            "the program: look at their stacks, or give a longer timeout",
            self.silent,
        )


def same_arguments(**arguments: object) -> str:
    """Return a text for the `same` of a vote. The vote then names the arguments that differ between ranks."""
    return json.dumps({name: shortened(str(value), _MAX_ARGUMENT) for name, value in arguments.items()})


def difference(mine: str, theirs: str, other: str) -> str:
    """Return the text of a `RankFailure`: this rank's `same` differs from that of rank `other`."""
    here, there = _arguments(mine), _arguments(theirs)
    differing = [
        f"{name} is {value} instead of {there[name]}"
        for name, value in here.items()
        if there.get(name, value) != value
    ]
    if not differing or here.keys() != there.keys():
        differing = [f"{_shown(mine)} instead of {_shown(theirs)}"]
    return f"differs from rank {other}: {', '.join(differing)}; give all ranks the same"


def shortened(text: str, most: int = _MAX_COMPARED) -> str:
    """Return `text`, or its beginning and hash if it has more than `most` characters or is no Unicode."""
    shown = text[: most if len(text) <= most else most // 4].encode(errors="backslashreplace").decode()
    if shown == text:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{shown} … ({len(text)} characters, sha256 {digest})"


def _arguments(same: str) -> dict[str, str]:
    """The arguments of a text of `same_arguments`; empty for another text."""
    try:
        found = json.loads(same)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _shown(same: str) -> str:
    named = _arguments(same)
    return ", ".join(f"{name} {value}" for name, value in named.items()) if named else repr(same)
