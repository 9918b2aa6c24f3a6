"""Holds votes in the job's store, so that all ranks read the same result.

Every rank writes its status and increments a counter. The last to arrive, or a rank that sees a peer die or the
deadline pass, writes the result with compare-and-set. All ranks read the first result written, so all raise or none
does. A late rank reads the missed result, then continues with the next vote.

Invariants:

1. In a complete vote every rank took part, so no rank reads keys of earlier votes any more. They are deleted.
2. The rank that hosts the store leaves a vote last, so that it can exit right after.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tundish.distributed.job_store import JobStore, store_host_rank, store_load_factor
from tundish.distributed.peer_watch import PeerWatch
from tundish.distributed.process_groups import GroupInfo
from tundish.distributed.vote_result import RankFailure, VoteResult, difference, shortened
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

    def fails(self, number: int) -> bool:
        """Whether it is known that vote `number`, which this rank has not begun, fails or is flagged."""
        if self._watch.vanished():
            return True
        self._store.connect()
        return any(self._store.read(f"{number}/{key}") for key in ("result", "failed", "flagged"))

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
        """Report this rank's status; return how many ranks have reported theirs."""
        store, key = self._store, f"{vote.number}"
        if vote.same is not None and vote.failure is None:
            same = shortened(vote.same)
            other, _, first = store.write_once(f"{key}/same", f"{self._rank} {same}").partition(" ")
            if first != same:
                text = difference(same, first, other)
                vote.failure = RankFailure(rank=self._rank, text=text)
        if vote.value is not None:
            store.write(f"{key}/value/{self._rank}", vote.value)
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
