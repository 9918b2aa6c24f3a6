"""Holds a group's votes on a background thread, so that callers wait no longer than their timeout and Ctrl-C ends it.

The store can block for as long as its host is stopped. So the caller's thread never touches it: a daemon thread does,
and a caller whose time is up leaves that thread behind. It ends when the store answers.

Invariants:

1. Every `hold` is the next vote on its rank, whatever came of the one before.
2. A vote is first decided, or given up, in the shared memory of its node (`same_node_vote`); the others go to the
   store.
3. A vote that was interrupted closes the voter; the other ranks are told, in that vote or in the next one.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from tundish.distributed.job_store import store_load_factor
from tundish.distributed.process_groups import GroupInfo, VoteId, unique_name
from tundish.distributed.same_node_vote import SameNodeVote
from tundish.distributed.vote_protocol import LINGER_SECONDS, FailureSource, PendingVote, VoteProtocol
from tundish.distributed.vote_result import RankFailure, VoteResult
from tundish.errors import InvalidInputError, PeerFailedError, StoreLostError, TundishError, VoteTimeoutError

__all__ = ["VoteThread"]

# How long after its deadline a caller waits for the store to record that the deadline passed.
_ANSWER_SECONDS = 1.0
# In parts: a process that was stopped loses one of them, not all.
_ANSWER_PARTS = 8
# How long an interrupted caller waits for the others to be told.
_TELL_SECONDS = 0.4
# The longest single wait: a signal that comes just before a wait begins does not end it.
_LONGEST_WAIT = 0.5

_Tasks = queue.SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


def _run_tasks(tasks: _Tasks) -> None:
    # Between tasks the thread refers to no voter, so that one that nobody uses any more is collected.
    while (task := tasks.get()) is not None:
        future, function = task
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            future.set_exception(error)
        del task, future, function


class VoteThread:
    """Votes among the members of one group. All members create it, in the same order.

    Args:
        member: the group.
        node: ranks that give the same name watch each other and have one builder; they must share a kernel and a
            network namespace.
        known_losses: returns the lost ranks that other voters know of.

    Attributes:
        extra_failure: asked in each vote for the failure of a rank that will not come.
        warn_after: seconds after which a vote that waits logs for which ranks; None for never.
    """

    def __init__(
        self, member: GroupInfo, node: str, known_losses: Callable[[], Mapping[int, RankFailure]] = dict
    ) -> None:
        self.extra_failure: FailureSource | None = None
        self.warn_after: float | None = None
        self._member = member
        self._name = unique_name(member.name, member.ranks)
        self._process = os.getpid()
        self._number = 0
        self._closed = ""
        self._store_error: Exception | None = None
        self._tasks: _Tasks | None = None
        self._last_task: Future[Any] | None = None
        self._check: tuple[int, Future[bool]] | None = None
        self._one_vote = threading.Lock()
        self._memory = SameNodeVote(member.ranks.index(member.rank), len(member.ranks))
        self._protocol = VoteProtocol(member, node, f"votes/{self._name}", known_losses, self._memory.offer)
        self._protocol_lock = threading.Lock()

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node in the group's order; known after the first complete vote."""
        return self._protocol.node_ranks

    def lost_peers(self) -> dict[int, RankFailure]:
        """The members of this rank's node that were found gone, also between votes. For any thread."""
        return self._protocol.lost()

    @property
    def last_vote(self) -> VoteId:
        """The name and number of the last vote."""
        return VoteId(f"{self._name}-{self._number}", self._number)

    def skip_to(self, number: int) -> None:
        """Make `number` the next vote, if it is yet to come."""
        with self._one_vote:
            self._number = max(self._number, number)

    def hold(
        self, error: BaseException | None, what: str, seconds: float | None, **brought: Any
    ) -> tuple[TundishError | None, PendingVote]:
        """Collective: hold the next vote; returns the error that this rank has to raise, and the vote.

        Args:
            error: this rank's error.
            what: the step voted on.
            seconds: how long to wait for the others; None for as long as it takes.
            brought: fields of `PendingVote`.
        """
        self._refuse_unusable(what)
        with self._one_vote:
            failure = None if error is None else RankFailure.of(self._member.rank, error)
            vote = PendingVote(
                number=self._number,
                what=what,
                failure=failure,
                extra_failure=self.extra_failure,
                warn_after=self.warn_after,
                **brought,
            )
            vote.deadline = None if seconds is None else vote.started + seconds
            self._number += 1
            task: Future[Any] | None = None
            try:
                if self._decide_in_memory(vote, seconds):
                    return None, vote
                task = self._submit(lambda: self._hold_in_store(vote))
                self._wait(task, vote)
            except BaseException as interruption:
                self._report_interruption(vote, interruption)
                raise
            with vote.lock:
                result = vote.result
                vote.abandoned = result is None
        if result is None:
            return self._no_result(what, task, seconds or 0.0), vote
        return result.error(what, self._member.rank, late=not vote.posted), vote

    def next_vote_fails(self, seconds: float) -> bool:
        """Whether the next vote is known to fail, as far as the store tells within `seconds`."""
        if self._closed:
            return True
        with self._one_vote:
            number, check = self._number, self._check
            # A check that took longer than the caller waited for it counts the next time.
            if check is None or check[0] != number or (check[1].done() and not _fails(check[1])):
                check = self._check = (
                    number,
                    self._submit(lambda: self._locked(lambda: self._protocol.fails(number))),
                )
        wait([check[1]], seconds)
        return check[1].done() and _fails(check[1])

    def close(self, reason: str = "is closed") -> None:
        """Release sockets, the connection and the store; never waits."""
        self._closed = self._closed or reason
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            tasks.put(None)
        self._release_if_closed()

    def _refuse_unusable(self, what: str) -> None:
        if self._closed:
            raise InvalidInputError(f"{what}: this voter {self._closed}")
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"{what}: this voter was made before a fork: make one in the process that votes"
            )

    def _decide_in_memory(self, vote: PendingVote, seconds: float | None) -> bool:
        needs_store = (vote.failure, vote.value, vote.source, self._store_error)
        is_plain = not (vote.flag or self._protocol.has_values) and all(one is None for one in needs_store)
        if self._memory.decide(vote.number, is_plain=is_plain, same=vote.same, seconds=seconds):
            vote.result = VoteResult(complete=True)
        return vote.result is not None

    def _wait(self, task: Future[Any], vote: PendingVote) -> None:
        """Until the vote is over, or a little after its deadline."""
        while not task.done():
            left = _LONGEST_WAIT if vote.deadline is None else vote.deadline - time.monotonic()
            if left <= 0:
                break
            wait([task], min(left, _LONGEST_WAIT))
        part = _ANSWER_SECONDS * store_load_factor(len(self._member.ranks)) / _ANSWER_PARTS
        any(wait([task], part).done for _ in range(_ANSWER_PARTS))
        if vote.result is not None:
            # The rank that hosts the store waits for the others.
            wait([task], LINGER_SECONDS + _ANSWER_SECONDS)

    def _report_interruption(self, vote: PendingVote, interruption: BaseException) -> None:
        """Tell the other ranks in this vote, or in the next one where this one has succeeded; then close."""
        failure = vote.interruption = RankFailure.of(self._member.rank, interruption)

        def tell() -> None:
            if vote.result is None:
                self._hold_in_store(vote)
            if vote.result is not None and vote.result.succeeded:
                self._locked(lambda: self._protocol.fail(vote.number + 1, failure))

        if vote.result is None and self._memory.give_up(vote.number):
            vote.result = VoteResult(complete=True)
        self._memory.give_up(vote.number + 1)
        # Behind a vote in progress, which ends early, as it sees the interruption.
        tasks, told = self._tasks, Future[Any]()
        if tasks is None:
            told = self._submit(tell)
        else:
            tasks.put((told, tell))
        wait([told], _TELL_SECONDS)
        self.close("was interrupted in a vote and is closed: make a new one on all ranks")

    def _submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the thread call `function`; a new thread, where the last one is still busy."""
        tasks, task = self._tasks, Future[Any]()
        if tasks is None or self._last_task is None or not self._last_task.done():
            if tasks is not None:
                tasks.put(None)
            tasks = queue.SimpleQueue()
            weakref.finalize(self, tasks.put, None).atexit = False
            threading.Thread(target=_run_tasks, args=(tasks,), name="tundish-vote", daemon=True).start()
            self._tasks = tasks
        self._last_task = task
        tasks.put((task, function))
        if self._closed:
            # Perhaps it was closed just now: its thread may have ended.
            tasks.put(None)
        return task

    def _no_result(self, what: str, task: Future[Any] | None, seconds: float) -> TundishError:
        """The error where the vote has no result on this rank."""
        host = self._protocol.host
        if task is None or not task.done():
            text = f"{what}: the job's store did not answer within {seconds:.4g} s"
            if host is None:
                return VoteTimeoutError(f"{text}: look at the launcher that serves it", ())
            return VoteTimeoutError(f"{text}: rank {host}, which hosts it, is stopped or hung", (host,))
        trouble = task.exception()
        if isinstance(trouble, InvalidInputError):
            return trouble
        if host is None or host == self._member.rank:
            return StoreLostError(f"{what}: the job's store is gone or refuses ({trouble}): restart the job")
        return PeerFailedError(
            f"{what}: rank {host}, which hosts the job's store, was killed or vanished ({trouble})", host
        )

    # On the background thread.

    def _hold_in_store(self, vote: PendingVote) -> None:
        def hold() -> None:
            is_first = not self._protocol.node_ranks
            self._protocol.hold(vote)
            if is_first and self._protocol.node_ranks == self._member.ranks:
                self._memory.join(self._protocol.offered)
            elif is_first and self._protocol.node_ranks:
                self._memory.release()

        try:
            self._locked(hold)
        except InvalidInputError:
            raise
        except Exception as error:
            self._store_error = self._store_error or error
            raise

    def _locked(self, function: Callable[[], Any]) -> Any:
        """Call `function` unless the store was lost or the voter was closed."""
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
                self._protocol.close()
            finally:
                self._protocol_lock.release()


def _fails(check: Future[bool]) -> bool:
    return check.exception() is not None or check.result()
