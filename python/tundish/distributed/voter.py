"""Votes of a group: every rank reports its status, and all ranks raise one error or none.

A rank that fails raises its own error, all others `PeerFailedError` (or `VoteTimeoutError` for a silent rank), and the
next vote works. The job's store can block for as long as its host is stopped, so only a daemon thread uses it. A caller
whose timeout ends leaves that thread behind.

Invariants:

1. Every call uses the next vote number, even after a failed vote.
2. An interrupted vote closes the voter. The other ranks are told, in that vote or in the next one.
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
from tundish.distributed.vote_protocol import (
    LINGER_SECONDS,
    LostPeerError,
    RankFailure,
    RankVote,
    VoteProtocol,
    as_exception,
    check_same,
    check_size,
    no_result_error,
)
from tundish.errors import InvalidInputError, JobStoreLostError, TundishError
from tundish.timeouts import timeout_seconds

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
_group_voters_lock = threading.Lock()

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
        self._one_vote = threading.Lock()
        self._thread = DaemonThread("tundish-vote")
        self._protocol_lock = threading.Lock()
        # None in a world of one.
        self._protocol: VoteProtocol | None = None
        if len(member.ranks) > 1:
            name = f"votes/{self._name}"
            self._protocol = VoteProtocol(member, node_identity(), name, _known_losses(group))
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
            Exception: `error`, on the rank that gave it.
            PeerFailedError: another rank failed or was killed. `rank` is the lowest of them; the message contains the
                errors of up to eight ranks and names up to 64.
            VoteTimeoutError: a rank did not vote in time (`ranks` has the lowest 256 of them), or this rank came after
                the others had given up. All ranks are in step for the next vote.
            JobStoreLostError: the launcher's store is gone.
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

    def combine(
        self,
        value: str,
        combine: Callable[[list[str]], str],
        error: BaseException | None = None,
        *,
        what: str,
        same: str | None = None,
        timeout: timedelta | float | None = _VOTERS_TIMEOUT,
    ) -> str:
        """Collective: a vote in which every rank sends `value`, and receives one text made from the values of all.

        Args:
            value: what this rank sends.
            combine: makes the text from the values, in the group's order. It has to give the same on all ranks,
                because any one of them calls it, on another thread.
            error: as in `vote`.
            what: as in `vote`.
            same: as in `vote`.
            timeout: as in `vote`.

        Returns:
            The combined text. It travels through the job's store: kilobytes, not megabytes.

        Raises:
            The errors of `vote`.
            InvalidInputError: the value has more than 8 MiB (the others are told).
        """
        pending = self._hold(error, what, timeout, same=same, value=value, combine=combine)
        if self._protocol is None:
            return combine([value])
        if pending.received is None:
            raise JobStoreLostError(f"{what}: the job's store has lost the combined text: restart the job")
        return pending.received

    def run(
        self,
        work: Callable[[], T],
        *,
        what: str,
        undo: Callable[[T], object],
        timeout: timedelta | float | None = _VOTERS_TIMEOUT,
    ) -> T:
        """Collective: run work in which the ranks wait for each other, such as connecting them, and vote on it.

        The work runs on another thread. So Ctrl-C ends the wait for it, and so does a rank that is killed or fails.

        Args:
            work: called on another thread; it must end by itself.
            what: as in `vote`.
            undo: if the vote fails, called with the result of `work` as soon as there is one, on either thread.
            timeout: as in `vote`.

        Returns:
            The result of `work`.

        Raises:
            The errors of `vote`.
        """
        self._refuse_unusable(what)
        if self._protocol is None:
            return work()
        running = DaemonThread("tundish-work").submit(work)
        try:
            self._hold(None, what, timeout, work=running)
        except BaseException:
            running.add_done_callback(lambda done: None if done.exception() else undo(done.result()))
            raise
        return running.result()

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

    @property
    def last_vote(self) -> VoteId:
        """The name and number of the last vote, for names of what its ranks create together next."""
        return VoteId(f"{self._name}-{self._number}", self._number)

    def skip_to(self, number: int) -> None:
        """Make `number` the next vote if it is yet to come; the vote in the constructor has number 0.

        Afterwards all ranks use the same next vote number, even if one of them stopped early.
        """
        with self._one_vote:
            self._number = max(self._number, number)

    def close(self, reason: str = "is closed") -> None:
        """Release sockets and the store. Not collective, never waits; other members see this rank vanish.

        A vote of another thread ends with an error within half a second.

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
            try:
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
            problem = result.error(what, self.rank, late=not vote.posted)
        if error is None and vote.work is not None and vote.work.done() and vote.failure is not None:
            error = vote.work.exception()
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

    def _wait(self, task: Future[Any], vote: RankVote) -> None:
        """Wait until the vote is over, or a little after its deadline. Raises if another thread closes the voter."""
        while not task.done():
            if self._closed:
                raise InvalidInputError(f"{vote.what}: this voter {self._closed}")
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

        # The thread sees the interruption and ends a vote in progress early.
        wait([self._thread.submit(report)], _REPORT_SECONDS)
        self.close("was interrupted in a vote and is closed: make a new one on all ranks")

    # On the background thread.

    def _hold_in_store(self, protocol: VoteProtocol, vote: RankVote) -> None:
        try:
            self._locked(lambda: protocol.hold(vote))
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


def voter_of(group: Any) -> Voter:
    """The voter that a group's calling threads share. It lives as long as the group; nobody closes it.

    The ranks of a node watch each other from the group's first vote on, also between calls.

    Raises:
        InvalidInputError: as `vote`.
    """
    if len(group_info(group).ranks) == 1:
        return Voter(group, first_vote=False)
    key = torch_distributed().group.WORLD if group is None else group
    with _group_voters_lock:
        voter = group_voters.get(key)
        if voter is None:
            voter = group_voters[key] = Voter(group, first_vote=False)
            # At exit the kernel closes everything; a finaliser would only meet a half-dead interpreter.
            weakref.finalize(key, voter.close).atexit = False
    return voter


def vote(
    error: BaseException | None = None,
    *,
    what: str,
    same: str | None = None,
    group: Any = None,
    timeout: timedelta | float | None = DEFAULT_TIMEOUT,
) -> None:
    """Collective over `group`: report this rank's status; return when every rank reported success.

    All members call it in the same order, each on one thread; a background thread uses a `Voter`. In a world of one it
    raises `error`, if any.

    The other ranks of its node notice a killed rank within 1 s, if it voted before in `group` or in the whole job.
    Otherwise they wait for it until the timeout.

    Args:
        error: this rank's error; None if its work succeeded.
        what: the step voted on, for messages: "loading the data".
        same: a text that must be equal on all ranks, such as a hash of the configuration. All ranks give it or none.
        group: the `ProcessGroup` (None: all ranks).
        timeout: how long this rank waits for the others; seconds or a `timedelta`. None waits for as long as it takes.

    Raises:
        Exception: `error`, on the rank that gave it.
        PeerFailedError: another rank failed or was killed. `rank` is the lowest of them; the message contains the
            errors of up to eight ranks.
        VoteTimeoutError: a rank did not vote in time (`ranks` names up to 256 of them), or this rank came after the
            others had given up. The next vote works.
        JobStoreLostError: the store of the launcher is gone.
        InvalidInputError: the timeout is not positive, `same` is empty, this rank is not in `group`, or `WORLD_SIZE`
            says that there are several processes but no process group is initialised.
        InvalidTypeError: `error` is not an exception, or `timeout` is neither a number nor a `timedelta`.

    Example:
        >>> vote(what="loading the data")
        >>> vote(what="comparing the vocabularies", same="sha256:2c26b46b")
    """
    voter_of(group).vote(error, what=what, same=same, timeout=timeout)


def agreed(
    what: str, *, group: Any = None, timeout: timedelta | float | None = DEFAULT_TIMEOUT
) -> contextlib.AbstractContextManager[None]:
    """Collective over `group`: a block of fallible work that ends in a `vote`.

    If the block raises on one rank, its error goes on there, and the vote raises `PeerFailedError` on all others.

    Args:
        what: as in `vote`.
        group: as in `vote`.
        timeout: as in `vote`.

    Returns:
        The context manager of the block.

    Raises:
        TundishError: as `vote`, at the end of the block.

    Example:
        >>> with agreed("loading the data"):
        ...     lengths = [3, 4]
    """
    return voter_of(group).agreed(what, timeout=timeout)


def build_once_per_node(
    build: Callable[[], T],
    *,
    what: str,
    group: Any = None,
    timeout: timedelta | float | None = None,
) -> T | None:
    """Collective over `group`: run `build` on one rank of every node while the others wait.

    Args:
        build: slow work that may raise anything.
        what: a name of the result, for messages.
        group: the `ProcessGroup` (None: all ranks).
        timeout: how long the others wait for the builders; None, the default, for as long as they take.

    Returns:
        The result of `build` on the ranks that ran it, None on the others.

    Raises:
        The errors of `vote`: the builder's own error on its rank, `PeerFailedError` on all others.

    Example:
        >>> build_once_per_node(lambda: 42, what="building the answer")
        42
    """
    return voter_of(group).build_once_per_node(build, what=what, timeout=timeout)
