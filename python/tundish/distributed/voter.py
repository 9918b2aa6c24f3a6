"""Votes: every rank brings its status, and all ranks raise one error or none.

The functions `vote`, `agreed` and `build_once_per_node` are for code on each rank's calling thread. A `Voter` is for a
thread or a part that needs votes of its own. A rank that fails raises its own error, all others `PeerFailedError` (or
`VoteTimeoutError` for a silent rank), and the next vote works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from tundish.distributed.job_store import torch_distributed
from tundish.distributed.peer_watch import node_identity
from tundish.distributed.process_groups import GroupInfo, VoteId, group_info
from tundish.distributed.vote_protocol import FailureSource, PendingVote
from tundish.distributed.vote_result import LostPeerError, RankFailure
from tundish.distributed.vote_thread import VoteThread
from tundish.errors import InvalidInputError, InvalidTypeError, TundishError, listed
from tundish.timeouts import timeout_seconds

__all__ = ["DEFAULT_TIMEOUT", "Voter", "agreed", "build_once_per_node", "vote", "voter_of"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
# Seconds.
WARN_AFTER = 60.0
# The largest value that torch's store server takes, in bytes.
_MAX_TEXT_BYTES = 8 << 20

T = TypeVar("T")


class Voter:
    """Votes among the members of a group, apart from all other voters. A context manager.

    Collective: all members create it, on their calling threads and in the same order; the constructor ends with a first
    vote. Afterwards any one thread may vote with it, in the background too: it uses neither NCCL nor the group's own
    collectives, only the job's store and memory that the ranks of a node share. Two threads need two voters, else their
    votes could meet in another order on another rank.

    From the constructor on, a member on the same node that is killed is noticed within 1 s by every rank that is in a
    vote, and reported to other nodes through the store. A member that was gone before is noticed as soon by ranks of
    its node that had voted with it in the whole job or in `group`; where none had, the constructor waits for `timeout`.

    A vote that Ctrl-C interrupts closes the voter, which says so at its next use. The other ranks raise an error that
    names this rank, in that vote or in the next one.

    Args:
        group: the `ProcessGroup` (None: all ranks). Without torch.distributed, a world of one.
        timeout: how long the constructor waits for the other members; seconds or a `timedelta`.
        warn_after: seconds after which a vote that waits logs, on one rank, which ranks it waits for, and again after
            twice as many; None where members may take long as a matter of course.

    Attributes:
        rank: this process's global rank.
        ranks: the global ranks of all members, in the group's order.

    Raises:
        What `vote` raises.
    """

    rank: int
    ranks: tuple[int, ...]

    def __init__(
        self,
        group: Any = None,
        *,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        warn_after: float | None = WARN_AFTER,
    ) -> None:
        self._join(group_info(group), node_identity(), group, warn_after)
        self._meet(timeout)

    @classmethod
    def among(cls, ranks: Sequence[int], *, timeout: timedelta | float = DEFAULT_TIMEOUT) -> Self:
        """A voter of global `ranks` that need not be a group. Only they create it, with the same ranks in order.

        Raises:
            InvalidInputError: this process is none of them.
            What `vote` raises.
        """
        world = group_info(None)
        members = tuple(ranks)
        if world.rank not in members:
            raise InvalidInputError(
                f"rank {world.rank} is not among the ranks [{listed(members)}]: only they make this call"
            )
        voter = cls.__new__(cls)
        voter._join(dataclasses.replace(world, ranks=members, name="among"), node_identity())
        voter._meet(timeout)
        return voter

    @classmethod
    def _without_first_vote(cls, group: Any, node: str) -> Self:
        """A voter on a node called `node`. Tests give ranks of one machine different names, and have several nodes."""
        voter = cls.__new__(cls)
        voter._join(group_info(group), node, group)
        return voter

    def _meet(self, timeout: timedelta | float) -> None:
        try:
            self.vote(what="meeting of a new voter", timeout=timeout)
        except BaseException:
            self.close()
            raise

    def _join(
        self, member: GroupInfo, node: str, group: Any = None, warn_after: float | None = WARN_AFTER
    ) -> None:
        self.rank, self.ranks = member.rank, member.ranks
        self._thread = VoteThread(member, node, _known_losses(group)) if len(member.ranks) > 1 else None
        if self._thread is not None:
            self._thread.warn_after = warn_after

    def vote(
        self,
        error: BaseException | None = None,
        *,
        what: str,
        same: str | None = None,
        flag: bool = False,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
    ) -> bool:
        """Collective: bring this rank's status; returns when every rank brought a good one.

        A rank whose vote failed waits half a second for the others, so that all failures are named.

        Args:
            error: what went wrong on this rank; None when nothing did.
            what: the step voted on, for messages: "building the plan".
            same: what has to be equal on all ranks, a text that is not empty: a rank that brings another one fails.
                Either all ranks give it or none.
            flag: something that all ranks are to know of when it is true on one of them.
            timeout: how long this rank waits for the others; None for as long as it takes.

        Returns:
            Whether any rank gave a `flag`, the same on all ranks.

        Raises:
            The `error` given, on the rank that gave it.
            PeerFailedError: another rank failed, or was killed. `rank` is its global rank, the lowest of several; the
                message has the errors of eight ranks, names up to 64 ranks and counts the others.
            VoteTimeoutError: a rank did not vote in time (`ranks` names the lowest 256 of them), or this rank came
                after the others had given up on it. All ranks are in step for the next vote.
            StoreLostError: the launcher's store is gone, and the vote needs it: not all ranks are on one node, or well.
            InvalidInputError: the timeout is not positive, `same` is empty (the others are told), or the voter is
                closed, was interrupted, or was taken over a fork.
        """
        pending = self._hold(error, what, timeout, same=same, flag=flag)
        return pending.result.flagged if pending.result is not None else flag

    @contextlib.contextmanager
    def extra_failure_source(self, find: FailureSource) -> Iterator[None]:
        """A block in whose votes this rank, while it waits, asks `find` now and then for a rank that will not come.

        `find` returns that rank's failure, or None; it is called on another thread. The vote fails as if that rank had.
        """
        if self._thread is None:
            yield
            return
        before, self._thread.extra_failure = self._thread.extra_failure, find
        try:
            yield
        finally:
            self._thread.extra_failure = before

    def next_vote_fails(self, seconds: float) -> bool:
        """Whether it is known before this rank votes that the next vote fails or is flagged.

        For a rank that waits for the others in another way, in which it does not hear of a failure.

        Args:
            seconds: how long the job's store may take to answer. If it does not, the answer is False.
        """
        return self._thread is not None and self._thread.next_vote_fails(seconds)

    def lost_peers(self) -> Mapping[int, RankFailure]:
        """The other members of this node that are gone or closed their voter, by rank. For any thread."""
        return {} if self._thread is None else self._thread.lost_peers()

    def lost_peer(self) -> RankFailure | None:
        """The failure of the lowest lost peer of this node; None while all are there."""
        lost = self.lost_peers()
        return lost[min(lost)] if lost else None

    def raise_if_peer_lost(self) -> None:
        """Raise `PeerFailedError` where another member of this node is known to be gone.

        For long work that ends in a vote, to be called now and then, on any thread: it asks the kernel, not the store.
        Brought to the vote, the error counts as that member's failure, and all ranks raise the same.
        """
        lost = self.lost_peer()
        if lost is not None:
            raise LostPeerError(lost)

    @property
    def last_vote(self) -> VoteId:
        """The name and number of the last vote, to name what its ranks create together next."""
        return VoteId("alone", 0) if self._thread is None else self._thread.last_vote

    def skip_to(self, number: int) -> None:
        """Make `number` the next vote, counted from the one in the constructor, if it is yet to come.

        Ranks may hold different numbers of votes when one of them loses the store. They meet again so.
        """
        if self._thread is not None:
            self._thread.skip_to(number)

    def gather(
        self,
        value: str,
        error: BaseException | None = None,
        *,
        what: str,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
    ) -> list[str]:
        """Collective: a vote to which every rank also brings `value` for the group's first rank.

        Returns:
            On the first rank the values of all ranks in the group's order, on the others an empty list. They travel
            through the job's store: kilobytes, not megabytes.

        Raises:
            What `vote` raises.
            InvalidInputError: the value has more than 8 MiB (the others are told).
        """
        pending = self._hold(error, what, timeout, value=value, gathers=True)
        return [value] if self._thread is None else pending.values

    def broadcast(
        self,
        text: str | None,
        error: BaseException | None = None,
        *,
        source: int,
        what: str,
        same: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
    ) -> str:
        """Collective: a vote after which every rank knows the `text` of its `source`.

        Args:
            text: what this rank sends; not None on a rank that is the source of any. A text that nobody asks for is not
                read.
            error: as in `vote`.
            source: the global rank whose text this rank gets. Ranks may name different ones.
            what, same, timeout: as in `vote`.

        Returns:
            The text of `source`. It travels through the job's store: kilobytes, not megabytes.

        Raises:
            What `vote` raises.
            InvalidInputError: the source sent nothing, or the text has more than 8 MiB (the others are told).
        """
        pending = self._hold(error, what, timeout, same=same, value=text, source=source)
        received = text if self._thread is None else pending.received
        if received is None:
            raise InvalidInputError(f"{what}: rank {source} sent nothing")
        return received

    def _hold(
        self, error: BaseException | None, what: str, timeout: timedelta | float | None, **brought: Any
    ) -> PendingVote:
        seconds = None if timeout is None else timeout_seconds(timeout)
        if error is None and brought.get("same") is not None:
            error = _check_same(brought["same"], what)
        problem: TundishError | None = None
        pending = PendingVote(number=0, what=what)
        if self._thread is not None:
            refusal = _check_size(brought.get("value"), what)
            if refusal is not None:
                brought["value"], error = None, error or refusal
            problem, pending = self._thread.hold(error, what, seconds, **brought)
        # A rank that only saw that another one is gone raises what all do.
        if error is not None and (problem is None or not isinstance(error, LostPeerError)):
            raise error
        if problem is not None:
            raise problem
        return pending

    def agreed(
        self, what: str, *, same: str | None = None, timeout: timedelta | float | None = DEFAULT_TIMEOUT
    ) -> contextlib.AbstractContextManager[None]:
        """Collective: a block of fallible work that ends in a vote, whether it succeeds or raises.

        Args:
            what, same, timeout: as in `vote`.
        """
        return _AgreedBlock(self, what, same, timeout)

    def build_once_per_node(
        self, build: Callable[[], T], *, what: str, timeout: timedelta | float | None = None
    ) -> T | None:
        """Collective: run `build` on one rank of every node while the others wait; then all vote.

        The builder of a node is its first rank in the group (local rank 0, where the group holds it).

        Args:
            build: slow work that may raise anything. It must not vote with this voter. It may call
                `raise_if_peer_lost`, which ends it when another rank of its node is gone.
            what: what is built, for messages.
            timeout: how long the others wait for the builders; None, the default, for as long as they take.

        Returns:
            What `build` returned on builders, None on the others, once all builders are done.

        Raises:
            What `vote` raises: a builder's own error on it, `PeerFailedError` on all others, also within 1 s when a
            builder is killed. Ctrl-C in a builder is reported to the others likewise.
        """
        self.vote(what=f"{what}: meeting before it")
        built: T | None = None
        with self.agreed(what, timeout=timeout):
            if self._thread is None or self._thread.node_ranks[0] == self.rank:
                built = build()
        return built

    def close(self) -> None:
        """Release sockets and the store; not collective. Members that still vote see this rank vanish."""
        if self._thread is not None:
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _AgreedBlock(contextlib.AbstractContextManager[None]):
    """A block that ends in a vote. No generator: one that is dropped unfinished would vote when it is collected."""

    def __init__(self, voter: Voter, what: str, same: str | None, timeout: timedelta | float | None) -> None:
        self._voter = voter
        self._what = what
        self._same = same
        self._timeout = timeout

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._voter.vote(error, what=self._what, same=self._same, timeout=self._timeout)


def _check_same(same: Any, what: str) -> TundishError | None:
    """What is wrong with `same`. Brought as this rank's status: it is often computed, and wrong on one rank alone."""
    if not isinstance(same, str):
        return InvalidTypeError(f"{what}: same must be a text, not of type {type(same).__name__}")
    return (
        None if same else InvalidInputError(f"{what}: an empty text was given as same; give what to compare")
    )


def _check_size(text: str | None, what: str) -> TundishError | None:
    """What is wrong with a text to send: the store would end the connection that all voters of the process share."""
    try:
        size = 0 if text is None else len(text.encode())
    except UnicodeEncodeError as error:
        return InvalidInputError(f"{what}: a text was given that is no Unicode ({error}): give it as JSON")
    if size <= _MAX_TEXT_BYTES:
        return None
    return InvalidInputError(
        f"{what}: a text of {size} bytes was given, and the job's store takes no more than {_MAX_TEXT_BYTES}: share "
        "what is so large in another way"
    )


# The voter of a group's calling threads lives exactly as long as the group.
_voters: weakref.WeakKeyDictionary[Any, Voter] = weakref.WeakKeyDictionary()
_voters_lock = threading.Lock()


def voter_of(group: Any) -> Voter:
    """The voter of a group's calling threads, which lives as long as the group; nobody closes it.

    Its members watch one another from the group's first vote on, also between calls.

    Raises:
        InvalidInputError: as `vote` does.
    """
    member = group_info(group)
    if len(member.ranks) == 1:
        return Voter._without_first_vote(group, node_identity())
    key = torch_distributed().group.WORLD if group is None else group
    with _voters_lock:
        voter = _voters.get(key)
        if voter is None:
            voter = _voters[key] = Voter._without_first_vote(group, node_identity())
            # At exit the kernel closes everything; a finaliser would only meet a half-dead interpreter.
            weakref.finalize(key, voter.close).atexit = False
    return voter


def _known_losses(group: Any) -> Callable[[], Mapping[int, RankFailure]]:
    """Returns which ranks of this node the voters of the whole job and of `group` know to be gone.

    Other voters do not count: their members may close them and live on.
    """
    own = None if group is None else weakref.ref(group)

    def losses() -> Mapping[int, RankFailure]:
        groups = [torch_distributed().group.WORLD, None if own is None else own()]
        voters = [_voters.get(one) for one in groups if one is not None]
        return {
            rank: one for voter in voters if voter is not None for rank, one in voter.lost_peers().items()
        }

    return losses


def vote(
    error: BaseException | None = None,
    *,
    what: str,
    same: str | None = None,
    group: Any = None,
    timeout: timedelta | float | None = DEFAULT_TIMEOUT,
) -> None:
    """Collective over `group` (None: all ranks): bring this rank's status; see `Voter.vote`.

    With `same` all ranks make sure that they go on with the same: a hash of the configuration, the step.

    All members call it from one thread each, in the same order; a background thread uses a `Voter`. In a world of one
    it raises `error`, if any. A killed peer is noticed by the others of its node once it came to a vote of the group,
    or of the whole job; one that was gone before is waited for.

    Raises:
        What `Voter.vote` raises.
        InvalidInputError: this rank is not in `group`, or `WORLD_SIZE` says that there are several processes but no
            process group is initialised.

    Example:
        >>> vote(what="loading the data")
        >>> vote(what="comparing the vocabularies", same="sha256:2c26b46b")
    """
    voter_of(group).vote(error, what=what, same=same, timeout=timeout)


def agreed(
    what: str, *, group: Any = None, timeout: timedelta | float | None = DEFAULT_TIMEOUT
) -> contextlib.AbstractContextManager[None]:
    """Collective over `group`: a block of fallible work that ends in a vote; see `Voter.vote`.

    If the block raises, the other ranks are told and its error is raised again. If it ends well, it raises when it
    failed on another rank.

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
    """Collective over `group`: run `build` on one rank of every node; see `Voter.build_once_per_node`.

    Example:
        >>> build_once_per_node(lambda: 42, what="building the answer")
        42
    """
    return voter_of(group).build_once_per_node(build, what=what, timeout=timeout)
