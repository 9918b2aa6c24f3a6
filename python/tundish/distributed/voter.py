"""Votes: every rank brings its status, and all ranks raise one error or none.

Two faces of the same protocol (`tundish.distributed.channel`): the functions `vote`, `agreed` and
`build_once_per_node` for code that runs on each rank's calling thread, and `Voter` for a thread or a
part that needs a sequence of votes of its own. What always holds: a failing rank raises its own error, all
others `PeerFailedError` (or `VoteTimeoutError` for a silent rank), and the next vote works.
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

from tundish.distributed.channel import Channel
from tundish.distributed.groups import GroupInfo, VoteId, group_info
from tundish.distributed.jobstore import torch_distributed
from tundish.distributed.verdict import GoneError, Outcome, RankFailure
from tundish.distributed.watch import node_identity
from tundish.errors import InvalidInputError, InvalidTypeError, TundishError, listed
from tundish.timeouts import timeout_seconds
from tundish.waiting import was_let_go

__all__ = ["DEFAULT_TIMEOUT", "Voter", "agreed", "build_once_per_node", "vote", "voter_of"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
# Seconds.
WARN_AFTER = 60.0
# Bytes that a server of torch's takes for a value.
_LONGEST_TEXT = 8 << 20

T = TypeVar("T")


class Voter:
    """Votes among the members of a group, apart from all other voters. A context manager.

    Collective: all members make it, on their calling threads and in the same order; the constructor ends
    with a first vote. Afterwards any one thread may vote with it, in the background too: it uses neither
    NCCL nor the group's own collectives, only the job's store and, among ranks of one node, memory that they share. Two
    threads need two voters, else their votes could meet in another order on another rank.

    From the constructor on, a member on the same node that is killed is noticed within 1 s of the kernel
    ending it, by whoever is in a vote, and told to the members on other nodes through the store. One that was gone
    before is noticed as soon by those of its node that voted with it in the whole job or in `group` (`vote`, or what
    makes such votes: `pack(share=True)`, `node_shared`); where none did, the constructor waits for it as long as
    `timeout`.

    Args:
        group: the `ProcessGroup` (None: all ranks). Without torch.distributed, a world of one.
        timeout: how long the constructor waits for the other members; seconds or a `timedelta`.
        warn_after: seconds after which a vote that waits says in the log of one rank for whom, and again when twice as
            many have passed; None where members may take long as a matter of course.

    Attributes:
        rank: this process's global rank.
        ranks: the global ranks of all members, in the group's order.

    Raises what `vote` raises.
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
        """A voter of `ranks`, global ones, which need not be a group. They alone make it, with the same ranks in order.

        Raises `InvalidInputError` where this process is none of them, and what the constructor raises.
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
    def _unmet(cls, group: Any, node: str) -> Self:
        """A voter without the first vote, on a node called `node`.

        Tests give different names to ranks of one machine and so have several nodes.
        """
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
        self._channel = Channel(member, node, _gone_before(group)) if len(member.ranks) > 1 else None
        if self._channel is not None:
            self._channel.warn_after = warn_after

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

        Args:
            error: what went wrong on this rank; None when nothing did.
            what: the step voted on, for messages: "building the plan".
            same: what has to be equal on all ranks, a text that is not empty: a rank that brings another one fails.
                Either all ranks give it or none.
            flag: something that all ranks are to know of, wherever it is.
            timeout: how long this rank waits for the others; None for as long as it takes.

        Returns whether any rank gave a `flag`, the same on all ranks.

        Raises:
            The `error` given, on the rank that gave it.
            PeerFailedError: another rank failed, or was killed. `rank` is its global rank, the lowest of
                several; the message has type and text of eight errors, names some 64 ranks and counts the others.
            VoteTimeoutError: a rank did not vote in time (`ranks` names those that did not, the lowest 256), or this
                rank came when the others had given up on it; all ranks are in step for the next vote.
            StoreLostError: the launcher's store is gone, and the vote needs it: not all ranks are on one node, or well.
            InvalidInputError: a timeout that is not positive, an empty `same` (a status: the others are told), or a
                voter closed or taken over a fork.

        Once a rank failed, the others are given half a second more to name their own failures.
        """
        return self._hold(error, what, timeout, same=same, note=flag).is_noted

    @contextlib.contextmanager
    def extra_failure_source(self, missed: Callable[[], RankFailure | None]) -> Iterator[None]:
        """A block in whose votes this rank, while it waits, asks now and then which other one will not come, and why.

        `missed`: what tells it, on another thread; None as long as all may. A vote then fails as if that rank had.
        """
        if self._channel is None:
            yield
            return
        before, self._channel.missed = self._channel.missed, missed
        try:
            yield
        finally:
            self._channel.missed = before

    def note_in_spite_of_interrupt(self) -> bool | None:
        """What the last vote would have returned, had Ctrl-C not ended its wait; None where it failed.

        The other ranks go on then as if this one did: it has to give up in a way that they hear of.
        """
        outcome = None if self._channel is None else self._channel.last_outcome
        return None if outcome is None else outcome.is_noted

    def next_vote_fails(self, seconds: float) -> bool:
        """Whether it is known before this rank votes that the next vote will not go well.

        Another rank is gone, or came to it and failed, or notes something. For who waits for the others in a way in
        which it does not hear of that. `seconds`: how long the job's store may take to answer; what it does not answer
        is not known.
        """
        return self._channel is not None and self._channel.next_vote_fails(seconds)

    def lost_peers(self) -> Mapping[int, RankFailure]:
        """The other members of this node that are gone, or closed theirs, and how. On any thread."""
        return {} if self._channel is None else self._channel.gone()

    def lost_peer(self) -> RankFailure | None:
        """The failure of the lowest lost peer of this node; None while all are there."""
        gone = self.lost_peers()
        return gone[min(gone)] if gone else None

    def raise_if_peer_lost(self) -> None:
        """Raise `PeerFailedError` where another member of this node is known to be gone.

        For long work that ends in a vote, which is lost then, to ask now and then, on any thread: the kernel is asked,
        and not the store. Brought to the vote it is that member's failure, and all ranks raise the same.
        """
        lost = self.lost_peer()
        if lost is not None:
            raise GoneError(lost)

    @property
    def last_vote(self) -> VoteId:
        """Of the last vote: for what the ranks that came to it make together next."""
        return VoteId("alone", 0) if self._channel is None else self._channel.last_vote

    def skip_to(self, number: int) -> None:
        """Let the next vote be that of this number, counted from the one that made the voter, where it is yet to come.

        Ranks for which a vote ended differently, as one of them lost sight of the store, may go through different
        numbers of votes: so they meet again.
        """
        if self._channel is not None:
            self._channel.skip_to(number)

    def gather(
        self,
        value: str,
        error: BaseException | None = None,
        *,
        what: str,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
    ) -> list[str]:
        """Collective: a vote to which every rank also brings `value`, for the group's first rank.

        Returns the values of all ranks in the group's order there, an empty list on the others. They travel
        through the job's store: kilobytes, not megabytes.

        Raises what `vote` raises, and `InvalidInputError` for more than 8 MiB (a status: the others are told).
        """
        gathered = self._hold(error, what, timeout, brought=value).gathered
        return [value] if self._channel is None else list(gathered)

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
        """Collective: a vote after which every rank knows the `text` of one of them, not always of the same one.

        Args:
            text: what this rank tells; not None on a rank that is the source of any. A text that nobody asks for
                is not read.
            error: as in `vote`.
            source: the global rank whose text this rank gets, a member of the group.
            what, same, timeout: as in `vote`.

        Returns the text of `source`. It travels through the job's store: kilobytes, not megabytes.

        Raises what `vote` raises, and `InvalidInputError` where the source told nothing, or for more than 8 MiB (a
        status: the others are told).
        """
        heard = self._hold(error, what, timeout, same=same, told=text, source=source).heard
        if self._channel is None:
            heard = text
        if heard is None:
            raise InvalidInputError(f"{what}: rank {source} told nothing")
        return heard

    def _hold(
        self,
        error: BaseException | None,
        what: str,
        timeout: timedelta | float | None,
        *,
        same: str | None = None,
        brought: str | None = None,
        told: str | None = None,
        source: int | None = None,
        note: bool = False,
    ) -> Outcome:
        outcome = Outcome(None, is_noted=note)
        seconds = None if timeout is None else timeout_seconds(timeout)
        if error is None and same is not None:
            error = _no_text(same, what)
        if self._channel is not None:
            refusal = _refusal_to_carry(brought if told is None else told, what)
            if refusal is not None:
                brought, told, error = None, None, error or refusal
            outcome = self._channel.hold(
                error, what, seconds, same=same, brought=brought, told=told, source=source, note=note
            )
        # Who only saw that another rank is gone raises what all do.
        if error is not None and (outcome.problem is None or not isinstance(error, GoneError)):
            raise error
        if outcome.problem is not None:
            raise outcome.problem
        return outcome

    @contextlib.contextmanager
    def agreed(
        self, what: str, *, same: str | None = None, timeout: timedelta | float | None = DEFAULT_TIMEOUT
    ) -> Iterator[None]:
        """Collective: a block of fallible work that ends in a vote, whether it succeeds or raises.

        Args:
            what, same, timeout: as in `vote`.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            if was_let_go(caught):
                # It is no time for a vote: the caller is at something else by now.
                raise
            error = caught
        self.vote(error, what=what, same=same, timeout=timeout)

    def build_once_per_node(
        self, build: Callable[[], T], *, what: str, timeout: timedelta | float | None = None
    ) -> T | None:
        """Collective: run `build` on one rank of every node while the others wait; then all vote.

        The builder of a node is its lowest rank in the group (local rank 0, where the group holds it).

        Args:
            build: slow work; may be long, and raise anything. It must not vote with this voter. It hears of the
                others where it asks: `raise_if_peer_lost` ends it when one of its node is gone.
            what: what is built, for messages.
            timeout: how long the others wait for the builders; None, the default, for as long as they take.

        Returns what `build` returned on builders, None on the others, once all builders are done.

        Raises what `vote` raises: a builder's own error on it, `PeerFailedError` on all others, also within
        1 s when a builder is killed. Ctrl-C in a builder is told to the others likewise.
        """
        self.vote(what=f"{what}: meeting before it")
        built: T | None = None
        with self.agreed(what, timeout=timeout):
            if self._channel is None or self._channel.mates[0] == self.rank:
                built = build()
        return built

    def close(self) -> None:
        """Let go of sockets and the store; not collective. Members that still vote see this rank vanish."""
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _no_text(same: Any, what: str) -> TundishError | None:
    """What is wrong with `same`: often computed, so that it may be on one rank alone, and is told to the others."""
    if not isinstance(same, str):
        return InvalidTypeError(f"{what}: same must be a text, not of type {type(same).__name__}")
    return (
        None if same else InvalidInputError(f"{what}: an empty text was given as same; give what to compare")
    )


def _refusal_to_carry(text: str | None, what: str) -> TundishError | None:
    """What is wrong with a text that is to travel: the store would end the connection that all voters here share."""
    try:
        size = 0 if text is None else len(text.encode())
    except UnicodeEncodeError as error:
        return InvalidInputError(f"{what}: a text was given that is no Unicode ({error}): give it as JSON")
    if size <= _LONGEST_TEXT:
        return None
    return InvalidInputError(
        f"{what}: a text of {size} bytes was given, and the job's store takes no more than {_LONGEST_TEXT}: share what "
        "is so large in another way"
    )


# The voter of a group's calling threads lives exactly as long as the group.
_voters: weakref.WeakKeyDictionary[Any, Voter] = weakref.WeakKeyDictionary()
_voters_lock = threading.Lock()


def voter_of(group: Any) -> Voter:
    """The voter of a group's calling threads, which lives as long as the group; nobody closes it.

    Its members watch one another from the group's first vote on, also between calls.

    Raises `InvalidInputError` as `vote` does.
    """
    member = group_info(group)
    if len(member.ranks) == 1:
        return Voter._unmet(group, node_identity())
    key = torch_distributed().group.WORLD if group is None else group
    with _voters_lock:
        voter = _voters.get(key)
        if voter is None:
            voter = _voters[key] = Voter._unmet(group, node_identity())
            # At exit the kernel closes everything; a finaliser would only meet a half-dead interpreter.
            weakref.finalize(key, voter.close).atexit = False
    return voter


def _gone_before(group: Any) -> Callable[[], Mapping[int, RankFailure]]:
    """What tells which ranks of this node the lasting voters found gone, that of the whole job and that of `group`.

    They alone tell: any other's members may close theirs and live on, who to it are gone all the same.
    """
    own = None if group is None else weakref.ref(group)

    def gone() -> Mapping[int, RankFailure]:
        lasting = [torch_distributed().group.WORLD, None if own is None else own()]
        voters = [_voters.get(one) for one in lasting if one is not None]
        return {
            rank: one for voter in voters if voter is not None for rank, one in voter.lost_peers().items()
        }

    return gone


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

    All members call it from one thread each, in the same order; a background thread takes a `Voter`. In a
    world of one it raises `error`, if any. A killed peer is noticed by the others of its node once it came to a vote of
    the group, or of the whole job; one that was gone before is waited for.

    Raises what `Voter.vote` raises, and `InvalidInputError` when this rank is not in `group` or `WORLD_SIZE`
    says that there are several processes but no process group is initialised.

    >>> vote(what="loading the data")
    >>> vote(what="comparing the vocabularies", same="sha256:2c26b46b")
    """
    voter_of(group).vote(error, what=what, same=same, timeout=timeout)


@contextlib.contextmanager
def agreed(
    what: str, *, group: Any = None, timeout: timedelta | float | None = DEFAULT_TIMEOUT
) -> Iterator[None]:
    """Collective over `group`: a block of fallible work that ends in a vote; see `Voter.vote`.

    A block that raises raises the same error again once it was told to the others. A block that is left well
    raises when another rank's was not.

    >>> with agreed("loading the data"):
    ...     lengths = [3, 4]
    """
    voter = voter_of(group)
    with voter.agreed(what, timeout=timeout):
        yield


def build_once_per_node(
    build: Callable[[], T],
    *,
    what: str,
    group: Any = None,
    timeout: timedelta | float | None = None,
) -> T | None:
    """Collective over `group`: run `build` on one rank of every node; see `Voter.build_once_per_node`.

    >>> build_once_per_node(lambda: 42, what="building the answer")
    42
    """
    return voter_of(group).build_once_per_node(build, what=what, timeout=timeout)
