"""Votes of a group: every rank reports its status, and all ranks raise one error or none.

A rank that fails raises its own error, all others `PeerFailedError` (or `VoteTimeoutError` for a silent rank), and the
next vote works. The job's store can block for as long as its host is stopped, so only a daemon thread uses it. A caller
whose timeout ends leaves that thread behind.

Invariants:

1. Each call is the next vote on its rank, also after a vote that failed.
2. A vote is first decided, or given up, in the shared memory of its node. Only a vote given up there goes to the store.
3. An interrupted vote closes the voter. The other ranks are told, in that vote or in the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Final, Self, TypeVar

from tundish.daemon_thread import DaemonThread
from tundish.distributed.job_store import store_load_factor, torch_distributed
from tundish.distributed.peer_watch import node_identity
from tundish.distributed.process_groups import VoteId, group_info, unique_name
from tundish.distributed.shared_memory_vote import SharedMemoryVotes
from tundish.distributed.vote_protocol import (
    LINGER_SECONDS,
    RankVote,
    VoteProtocol,
    as_exception,
    check_same,
    check_size,
    no_result_error,
)
from tundish.distributed.vote_result import LostPeerError, RankFailure, VoteResult
from tundish.errors import InvalidInputError, TundishError
from tundish.timeouts import timeout_seconds

__all__ = ["DEFAULT_TIMEOUT", "Voter", "group_voters"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
# The default of `timeout` in votes: that of the voter.
_VOTERS_TIMEOUT: Final[Any] = object()
# Seconds after which a waiting vote logs the ranks that it waits for.
WARN_AFTER = 60.0
# How long after its deadline a caller waits for the store to record that the deadline passed.
_ANSWER_SECONDS = 1.0
# It waits in so many parts: a process that is stopped meanwhile loses one of them, not all.
_ANSWER_PARTS = 8
# How long an interrupted caller waits until the others are told.
_REPORT_SECONDS = 0.4
# The longest single wait: a signal that comes just before a wait begins does not end it.
_LONGEST_WAIT = 0.5

# The voter of each group's calling threads.
group_voters: weakref.WeakKeyDictionary[Any, Voter] = weakref.WeakKeyDictionary()

T = TypeVar("T")


class Voter:
    """Votes among the members of a group, apart from all other voters. A context manager.

    Collective: all members create it, on their calling threads and in the same order; the constructor ends with a vote.
    Afterwards one thread at a time may vote with it, also a background thread. Two threads need two voters.

    A rank that is killed is noticed within 1 s by the other ranks of its node. Other nodes learn of it through the
    job's store. This also holds for a rank that was killed before, if it had voted in the whole job or in `group`.

    Ctrl-C in a vote closes the voter, and its next use raises. The other ranks raise an error that names this rank, in
    that vote or in the next one.

    Args:
        group: the `ProcessGroup` (None: all ranks). Without torch.distributed, a world of one.
        ranks: the global ranks that vote, in order, this one among them; None for the whole group.
        timeout: how long a vote waits for the other members; seconds or a `timedelta`.
        warn_after: seconds after which a waiting vote logs, on one rank, the ranks that it waits for; doubled after
            each warning. None for no warnings, where members often take long.
        first_vote: whether the constructor ends with a vote.

    Attributes:
        rank: this process's global rank.
        ranks: the global ranks of all members, in the group's order.
        index: the place of this rank among them.
        is_first: whether it is the first.
        timeout: how long a vote waits, in seconds.

    Raises:
        The errors of `vote`.

    Example:
        >>> with Voter() as voter:
        ...     voter.vote(what="saving in the background")
        False
    """

    def __init__(
        self,
        group: Any = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        warn_after: float | None = WARN_AFTER,
        first_vote: bool = True,
    ) -> None:
        member = group_info(group)
        if ranks is not None:
            member = dataclasses.replace(member, ranks=tuple(ranks), name="ranks")
        self.rank, self.ranks = member.rank, member.ranks
        self.index = member.ranks.index(member.rank)
        self.is_first = self.index == 0
        self.timeout = timeout_seconds(timeout)
        self._warn_after = warn_after
        self._name = unique_name(member.name, member.ranks)
        self._process = os.getpid()
        self._number = 0
        self._closed = ""
        self._store_error: Exception | None = None
        self._check: tuple[int, Future[bool]] | None = None
        self._one_vote = threading.Lock()
        self._thread = DaemonThread("tundish-vote")
        self._memory = SharedMemoryVotes(self.index, len(member.ranks))
        self._protocol_lock = threading.Lock()
        # None in a world of one.
        self._protocol: VoteProtocol | None = None
        if len(member.ranks) > 1:
            name = f"votes/{self._name}"
            self._protocol = VoteProtocol(
                member, node_identity(), name, _known_losses(group), self._memory.offer
            )
        if first_vote:
            try:
                self.vote(what="connecting a new voter")
            except BaseException:
                self.close()
                raise

    def vote(
        self,
        error: BaseException | None = None,
        *,
        what: str,
        same: str | None = None,
        flag: bool = False,
        timeout: timedelta | float | None = _VOTERS_TIMEOUT,
    ) -> bool:
        """Collective: report this rank's status; return when every rank reported success.

        A failed rank waits half a second for the failures of others, so that all are named.

        Args:
            error: the error of this rank; None if it succeeded.
            what: the step voted on, for messages: "building the plan".
            same: a text, not empty, that must be equal on all ranks; a rank with another text fails. All ranks give it
                or none.
            flag: all ranks learn whether one of them gave True.
            timeout: how long this rank waits for the others, by default as long as the voter says; None for as long as
                it takes.

        Returns:
            Whether any rank gave a `flag`, the same on all ranks.

        Raises:
            The `error` given, on the rank that gave it.
            PeerFailedError: another rank failed or was killed. `rank` is the lowest of them; the message contains the
                errors of up to eight ranks and names up to 64.
            VoteTimeoutError: a rank did not vote in time (`ranks` has the lowest 256 of them), or this rank came after
                the others had given up. All ranks are in step for the next vote.
            JobStoreLostError: the launcher's store is gone. Votes that succeed on a single node do not need it.
            InvalidInputError: the timeout is not positive, `same` is empty (the others are told), or the voter is
                closed, was interrupted, or was created before a fork.
            InvalidTypeError: `error` is no exception (the others are told).
        """
        pending = self._hold(error, what, timeout, same=same, flag=flag)
        return pending.result.flagged if pending.result is not None else flag

    def gather(
        self,
        value: str,
        error: BaseException | None = None,
        *,
        what: str,
        timeout: timedelta | float | None = _VOTERS_TIMEOUT,
    ) -> list[str]:
        """Collective: a vote in which every rank also sends `value` to the group's first rank.

        Returns:
            On the first rank the values of all ranks in the group's order, on the others an empty list. They travel
            through the job's store: kilobytes, not megabytes.

        Raises:
            The errors of `vote`.
            InvalidInputError: the value has more than 8 MiB (the others are told).
        """
        pending = self._hold(error, what, timeout, value=value, gathers=True)
        return [value] if self._protocol is None else pending.values

    def broadcast(
        self,
        text: str | None,
        error: BaseException | None = None,
        *,
        source: int | None = None,
        what: str,
        same: str | None = None,
        timeout: timedelta | float | None = _VOTERS_TIMEOUT,
    ) -> str:
        """Collective: a vote in which every rank also receives the `text` of its `source`.

        Args:
            text: what this rank sends; None on ranks that are no source.
            error: as in `vote`.
            source: the global rank whose text this rank gets; None is the group's first. Ranks may name different ones.
            what: as in `vote`.
            same: as in `vote`.
            timeout: as in `vote`.

        Returns:
            The text of `source`. It travels through the job's store: kilobytes, not megabytes.

        Raises:
            The errors of `vote`.
            InvalidInputError: the source sent None, or the text has more than 8 MiB (the others are told).
        """
        source = self.ranks[0] if source is None else source
        pending = self._hold(error, what, timeout, same=same, value=text, source=source)
        received = text if self._protocol is None else pending.received
        if received is None:
            raise InvalidInputError(f"{what}: rank {source} sent nothing")
        return received

    def agreed(
        self, what: str, *, same: str | None = None, timeout: timedelta | float | None = _VOTERS_TIMEOUT
    ) -> contextlib.AbstractContextManager[None]:
        """Collective: a block of fallible work that ends in a `vote` with these arguments, also when it raises."""
        return _VoteAtExit(functools.partial(self.vote, what=what, same=same, timeout=timeout))

    def build_once_per_node(
        self, build: Callable[[], T], *, what: str, timeout: timedelta | float | None = None
    ) -> T | None:
        """Collective: the public `build_once_per_node`, with this voter.

        The builder of a node is its first rank in the group (local rank 0, where the group holds it). `build` must not
        vote with this voter; it may call `raise_if_peer_lost`.
        """
        self.vote(what=f"{what}: waiting for the ranks to begin it")
        built: T | None = None
        with self.agreed(what, timeout=timeout):
            if self._protocol is None or self._protocol.node_ranks[0] == self.rank:
                built = build()
        return built

    def lost_peers(self) -> Mapping[int, RankFailure]:
        """The other members of this node that are gone or closed their voter, by rank. For any thread."""
        return {} if self._protocol is None else self._protocol.lost()

    def raise_if_peer_lost(self) -> None:
        """Raise `PeerFailedError` if another member of this node is gone.

        Long work that ends in a vote calls it now and then, on any thread; it does not use the store. In the vote the
        error counts as the failure of the lost member, so that all ranks raise the same error.
        """
        lost = self.lost_peers()
        if lost:
            raise LostPeerError(lost[min(lost)])

    def next_vote_fails(self, seconds: float) -> bool:
        """Whether it is already known that the next vote fails or is flagged.

        For a rank that waits for the others in a call that does not report their failures.

        Args:
            seconds: how long to wait for the job's store. If it does not answer in time, the result is False.
        """
        protocol = self._protocol
        if protocol is None or self._closed:
            return bool(self._closed)
        with self._one_vote:
            number, check = self._number, self._check
            # The answer to an earlier check counts too, however late.
            if check is None or check[0] != number or (check[1].done() and not _fails(check[1])):
                future = self._thread.submit(
                    lambda: self._locked(lambda: protocol.fails(number)), waits=False
                )
                check = self._check = number, future
        wait([check[1]], seconds)
        return check[1].done() and _fails(check[1])

    @property
    def last_vote(self) -> VoteId:
        """The name and number of the last vote, for names of what its ranks create together next."""
        return VoteId(f"{self._name}-{self._number}", self._number)

    def skip_to(self, number: int) -> None:
        """Make `number` the next vote if it is yet to come; the vote in the constructor has number 0.

        Afterwards ranks are in step again that held different numbers of votes, because one of them stopped early.
        """
        with self._one_vote:
            self._number = max(self._number, number)

    def close(self, reason: str = "is closed") -> None:
        """Release sockets and the store. Not collective, never waits; other members see this rank vanish.

        Args:
            reason: ends the message "this voter ..." of the error at its next use.
        """
        self._closed = self._closed or reason
        self._thread.close()
        self._release_if_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(
        self, error: BaseException | None, what: str, timeout: timedelta | float | None, **brought: Any
    ) -> RankVote:
        """Hold the next vote. `brought`: fields of `RankVote`."""
        if timeout is _VOTERS_TIMEOUT:
            timeout = self.timeout
        seconds = None if timeout is None else timeout_seconds(timeout)
        error = as_exception(error, what)
        if error is None and brought.get("same") is not None:
            error = check_same(brought["same"], what)
        protocol = self._protocol
        if protocol is None:
            if error is not None:
                raise error
            return RankVote(number=0, what=what)
        refusal = check_size(brought.get("value"), what)
        if refusal is not None:
            brought["value"], error = None, error or refusal
        self._refuse_unusable(what)
        with self._one_vote:
            failure = None if error is None else RankFailure.of(self.rank, error)
            vote = RankVote(
                number=self._number, what=what, failure=failure, warn_after=self._warn_after, **brought
            )
            vote.deadline = None if seconds is None else vote.started + seconds
            self._number += 1
            task: Future[Any] | None = None
            try:
                if not self._decide_in_memory(protocol, vote, seconds):
                    task = self._thread.submit(lambda: self._hold_in_store(protocol, vote), waits=False)
                    self._wait(task, vote)
            except BaseException as interruption:
                self._report_interruption(protocol, vote, interruption)
                raise
            with vote.lock:
                result = vote.result
                vote.abandoned = result is None
        if result is None:
            problem: TundishError | None = no_result_error(what, self.rank, protocol.host, task, seconds)
        else:
            problem = result.error(what, self.rank, late=task is not None and not vote.posted)
        # A rank that only noticed the loss of another one raises the common error.
        if error is not None and (problem is None or not isinstance(error, LostPeerError)):
            raise error
        if problem is not None:
            raise problem
        return vote

    def _refuse_unusable(self, what: str) -> None:
        if self._closed:
            raise InvalidInputError(f"{what}: this voter {self._closed}")
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"{what}: this voter was made before a fork: make one in the process that votes"
            )

    def _decide_in_memory(self, protocol: VoteProtocol, vote: RankVote, seconds: float | None) -> bool:
        needs_store = (vote.failure, vote.value, vote.source, self._store_error)
        is_plain = not (vote.flag or protocol.has_values) and all(part is None for part in needs_store)
        if self._memory.decide(vote.number, is_plain=is_plain, same=vote.same, seconds=seconds):
            vote.result = VoteResult(complete=True)
        return vote.result is not None

    def _wait(self, task: Future[Any], vote: RankVote) -> None:
        """Wait until the vote is over, or a little after its deadline."""
        while not task.done():
            left = _LONGEST_WAIT if vote.deadline is None else vote.deadline - time.monotonic()
            if left <= 0:
                break
            wait([task], min(left, _LONGEST_WAIT))
        part = _ANSWER_SECONDS * store_load_factor(len(self.ranks)) / _ANSWER_PARTS
        any(wait([task], part).done for _ in range(_ANSWER_PARTS))
        if vote.result is not None:
            # The rank that hosts the store waits for the others.
            wait([task], LINGER_SECONDS + _ANSWER_SECONDS)

    def _report_interruption(
        self, protocol: VoteProtocol, vote: RankVote, interruption: BaseException
    ) -> None:
        """Tell the other ranks in this vote, or in the next one if this one has succeeded; then close."""
        failure = vote.interruption = RankFailure.of(self.rank, interruption)

        def report() -> None:
            if vote.result is None:
                self._hold_in_store(protocol, vote)
            if vote.result is not None and vote.result.succeeded:
                self._locked(lambda: protocol.fail(vote.number + 1, failure))

        if vote.result is None and self._memory.give_up(vote.number):
            vote.result = VoteResult(complete=True)
        self._memory.give_up(vote.number + 1)
        # The thread sees the interruption and ends a vote in progress early.
        wait([self._thread.submit(report)], _REPORT_SECONDS)
        self.close("was interrupted in a vote and is closed: make a new one on all ranks")

    # On the background thread.

    def _hold_in_store(self, protocol: VoteProtocol, vote: RankVote) -> None:
        def hold() -> None:
            is_first = not protocol.node_ranks
            protocol.hold(vote)
            if is_first and protocol.node_ranks == self.ranks:
                self._memory.join(protocol.offered)
            elif is_first and protocol.node_ranks:
                self._memory.release()

        try:
            self._locked(hold)
        except InvalidInputError:
            raise
        except Exception as error:
            self._store_error = self._store_error or error
            raise

    def _locked(self, function: Callable[[], Any]) -> Any:
        """Call `function` unless the store is lost or the voter is closed."""
        try:
            with self._protocol_lock:
                if self._store_error is not None:
                    raise self._store_error
                if self._closed:
                    raise InvalidInputError("this voter was closed during the vote")
                return function()
        finally:
            self._release_if_closed()

    def _release_if_closed(self) -> None:
        # A vote in progress holds the lock; its thread comes here when it ends.
        if self._closed and self._protocol_lock.acquire(blocking=False):
            try:
                self._memory.release()
                if self._protocol is not None:
                    self._protocol.close()
            finally:
                self._protocol_lock.release()


class _VoteAtExit(contextlib.AbstractContextManager[None]):
    """A block that ends in a vote. An unfinished generator would vote when it is garbage collected, so this is none."""

    def __init__(self, vote: Callable[[BaseException | None], bool]) -> None:
        self._vote = vote

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._vote(error)


def _known_losses(group: Any) -> Callable[[], Mapping[int, RankFailure]]:
    """Return a function: the lost ranks that the voters of the whole job and of `group` know of."""
    own = None if group is None else weakref.ref(group)

    def losses() -> Mapping[int, RankFailure]:
        groups = [torch_distributed().group.WORLD, None if own is None else own()]
        voters = [group_voters.get(one) for one in groups if one is not None]
        return {
            rank: one for voter in voters if voter is not None for rank, one in voter.lost_peers().items()
        }

    return losses


def _fails(check: Future[bool]) -> bool:
    return check.exception() is not None or check.result()
