"""What a source and a receiver of a scatter have in common: the ways to the others, waiting for them, losing them.

What always holds:

1. A rank that is lost ends it for all, at the round in which it is found to be, with an error that names it. Whoever
   was given a batch in that round hears of it in the next.
2. Whoever waits for a rank of this node looks now and then whether it is there.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypedDict

from torch import Tensor

from tundish._native import available_processors
from tundish.distributed import Voter
from tundish.errors import InvalidInputError, PeerFailedError, TimedOutError
from tundish.scatter.outgoing_batch import threads_of
from tundish.scatter.participants import Place
from tundish.scatter.rendezvous import Ways
from tundish.scatter.transport.gloo import GlooReceiver, GlooSender, Job, Sending
from tundish.scatter.transport.message_header import FAILED, LOST
from tundish.scatter.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tundish.waiting import wait_for

__all__ = ["GONE", "Member", "ScatterStats"]

# What is known of a rank whose end of a connection is closed: it may well be alive, and its loader closed.
GONE: Final = "was killed, has ended, or has left the scatter"

# How often whoever waits for a rank of its node looks whether it is there.
_LOOK_SECONDS = 0.1
# How much longer receivers wait than the source, which then tells them for whom it waited.
_GRACE_SECONDS = 1.0
# How long a source that ends, was interrupted, or was waiting in vain, waits for ranks of other nodes to hear why.
_FAREWELL_SECONDS = 0.5
# How long what a rank of another node has sent may be on its way when that is known to be gone.
_AFTER_DEATH_SECONDS = 0.5
_AFTER_CLOSE_SECONDS = 5.0
_LONGEST_TEXT = 16_000


class ScatterStats(TypedDict):
    """What one scatter did on this rank."""

    source: int
    """The global rank of the source."""
    ranks: list[int]
    """The global ranks of all who take part."""
    transports: dict[str, list[int]]
    """By name, the ranks on the other end: from which batches come, and to which they go."""
    rounds: int
    """Calls so far."""
    batches: int
    """Batches that were sent, or came."""
    sent_bytes: int
    """Bytes of batches that were sent."""
    waiting_seconds: float
    """Time spent waiting for the others."""
    memory: dict[str, int]
    """Bytes of shared memory of the source: on their way, kept for the next batches, held by receivers."""


class Member:
    """Collective over the members of `voter`: whoever takes part makes it, in the same order.

    `shared_memory`: whether ranks of one node use it; else all use the network. `timeout`: how long a rank waits for
    the others in a round. `in_loop`: whether the rounds are those of a loop, which an error of the source ends for all,
    also for those who have their batch of that round; a receiver, which is ahead of its caller, waits without end.
    `direct`: the kind of devices and the backend by which batches may go from device to device; all calls are then the
    caller's.
    """

    def __init__(
        self,
        voter: Voter | None,
        place: Place,
        *,
        timeout: timedelta,
        shared_memory: bool = True,
        in_loop: bool = False,
        direct: tuple[str, str] | None = None,
    ) -> None:
        self._place = place
        self._timeout = timeout
        self._in_loop = in_loop
        self._process = os.getpid()
        self._number = 0
        self._lost: PeerFailedError | None = None
        # Which error the others were told last, or on their way to being told when it went wrong: not the error, which
        # would keep all that was there when it was raised.
        self._told = 0
        self._batches = self._sent_bytes = self._largest = 0
        self._waited = 0.0
        # What was sent last to ranks of other nodes, and who waits for it, once all of it is under way.
        self._under_way: tuple[Sending, Job[dict[int, Exception]] | None] | None = None
        self._ways: Ways | None = None
        self._threads = 1
        # Batches of many tensors, and all that are large.
        self._announces = self._announces_large = False
        if voter is not None and len(place.ranks) > 1:
            # Whoever is ahead of its caller has time enough.
            self._ways = Ways(
                voter,
                place,
                shared_memory=shared_memory,
                timeout=timeout,
                direct=direct,
                awake=not in_loop,
            )
            receivers = len(self._ways.near)
            self._threads = threads_of(receivers)
            # Whoever is ahead of its caller has time enough, and who has no processor to itself takes the source's,
            # which pays only where there is much to get ready.
            self._announces = not in_loop and available_processors() > 1
            self._announces_large = self._announces and available_processors() > receivers

    @property
    def is_source(self) -> bool:
        """Whether this rank has the data."""
        return self._place.rank == self._place.source

    @property
    def place(self) -> Place:
        """Who takes part."""
        return self._place

    @property
    def lost(self) -> PeerFailedError | None:
        """Why there will be no other round."""
        return self._lost

    @property
    def largest(self) -> int:
        """Bytes of the largest batch that was sent in the last round, on the source."""
        return self._largest

    def has_told(self, error: BaseException) -> bool:
        """Whether the others were told of `error`, which was raised just now; to be asked once."""
        told, self._told = self._told, 0
        return told == id(error)

    def skip_to(self, number: int) -> None:
        """Let the next round be this one, where it is yet to come. What is sent of earlier ones is not read."""
        self._number = max(self._number, number - 1)

    def end(self, why: str) -> None:
        """Let there be no other round, because of what this rank did; the others see it leave."""
        if self._lost is None:
            self._lose(self._place.rank, why)
            if self._ways is not None:
                self._ways.watch.close()

    def close(self) -> None:
        """Let go of the ways to the others; not collective."""
        if self._ways is not None:
            self._ways.close()

    def stats(self) -> ScatterStats:
        transports: dict[str, list[int]] = {}
        memory = {"in_use": 0, "cached": 0, "escaped": 0}
        ways = self._ways
        if ways is not None:
            if ways.near:
                transports["shared memory"] = [lane.rank for lane in ways.near]
            far = "gloo" if ways.direct is None else f"{ways.direct.backend}, from device to device"
            if ways.far:
                transports[far] = [lane.rank for lane in ways.far]
            if ways.end is not None:
                name = "shared memory" if isinstance(ways.end, SharedMemoryReceiver) else far
                transports[name] = [ways.feeder, *transports.get(name, [])]
            for lane in ways.near:
                counts = lane.stats()
                memory["in_use"] += counts["in_use"]
                memory["cached"] += counts["cached"]
                memory["escaped"] += counts["escaped"]
        return ScatterStats(
            source=self._place.source,
            ranks=list(self._place.ranks),
            transports=transports,
            rounds=self._number,
            batches=self._batches,
            sent_bytes=self._sent_bytes,
            waiting_seconds=self._waited,
            memory=memory,
        )

    def _lanes(self) -> list[SharedMemorySender | GlooSender]:
        return [] if self._ways is None else [*self._ways.near, *self._ways.far]

    def _begin(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                "this scatter was made before a fork: make one in the process that uses it"
            )
        self._number += 1

    def _look_for_lost(self) -> None:
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        if self._ways is not None:
            # Whoever feeds this rank may be through with all that it gives.
            for rank in self._ways.watch.vanished() - {self._ways.feeder}:
                raise self._lose_gone(rank)

    def _patience_after(self, rank: int) -> float:
        """For how many seconds something may still come of a rank that is gone."""
        ways = self._ways
        if ways is None or not isinstance(ways.end, GlooReceiver) or rank != ways.feeder:
            return 0.0
        return _AFTER_CLOSE_SECONDS if rank in ways.watch.departed() else _AFTER_DEATH_SECONDS

    def _lose(self, rank: int, how: str) -> PeerFailedError:
        self._lost = PeerFailedError(f"scatter: rank {rank} {how}", rank)
        return self._lost

    def _lose_gone(self, rank: int) -> PeerFailedError:
        """Lose a rank that is gone, or the one because of whose end it left."""
        whose = None if self._ways is None else self._ways.watch.departed().get(rank)
        return self._lose(rank if whose is None else whose, GONE)

    def _waiter(self, rank: int, seconds: float | None = None) -> Callable[[Callable[[float], bool]], None]:
        return lambda wait: self._wait(wait, rank, seconds=seconds)

    def _wait(
        self,
        wait: Callable[[float], bool],
        rank: int | Callable[[], int | None],
        *,
        seconds: float | None = None,
        patient: bool = False,
    ) -> None:
        """Wait for something that comes from `rank`, of this node, or from elsewhere: then it may be known later.

        `seconds`: for how long, in place of the timeout.
        """
        if wait(0.0):
            return
        begin = time.monotonic()
        if seconds is None:
            seconds = self._timeout.total_seconds()
        deadline = begin + seconds + (0.0 if self.is_source else _GRACE_SECONDS)
        try:
            while not wait(_LOOK_SECONDS):
                name = rank() if callable(rank) else rank
                if name is not None and self._ways is not None and name in self._ways.watch.vanished():
                    # What it gave before stays, and comes from far away behind the news of its end.
                    if wait(self._patience_after(name)):
                        return
                    raise self._lose_gone(name)
                if time.monotonic() > deadline and not patient:
                    raise TimedOutError(
                        f"scatter: {'another rank' if name is None else f'rank {name}'} did not come within "
                        f"{seconds:.4g} s: hung, stopped or elsewhere in the program"
                    )
        finally:
            self._waited += time.monotonic() - begin

    def _tell(self, error: BaseException, untold: dict[int, SharedMemorySender | GlooSender]) -> None:
        """Tell those who wait for this round why it fails, and all others if there will be no other round."""
        self._told = id(error)
        ways = self._ways
        if ways is None:
            return
        # For those who are not told more, as Ctrl-C comes once more.
        told = FAILED, f"{self._place.source}\nleft this round"
        try:
            if error is not self._lost:
                told = FAILED, f"{self._place.source}\n{_described(error)}"
            else:
                assert self._lost is not None  # noqa: S101 (for the type checker)
                told = LOST, f"{self._lost.rank}\n{self._lost}"
            self._say(ways, error, told, untold)
        finally:
            # Whoever gave the tensors may change them now.
            for lane in ways.far:
                lane.break_seal(self._number, *told)

    def _say(
        self,
        ways: Ways,
        error: BaseException,
        told: tuple[int, str],
        untold: dict[int, SharedMemorySender | GlooSender],
    ) -> None:
        """Say what a round fails with, and wait until it was heard."""
        is_lost = error is self._lost
        # Ctrl-C is to end the call, and not another wait to begin.
        seconds = None if isinstance(error, Exception) else _FAREWELL_SECONDS
        gone = ways.watch.vanished()
        lanes = self._lanes() if is_lost or self._in_loop else list(untold.values())
        far: list[tuple[GlooSender, list[Tensor]]] = []
        for lane in lanes:
            # Whoever has this round hears of it in the next.
            number = self._number + (lane.rank not in untold)
            if isinstance(lane, GlooSender):
                # What was made for this round is not sent, or nobody knows.
                lane.forget()
                far.append((lane, lane.messages(number, told)))
                continue
            if lane.rank in gone:
                continue
            try:
                lane.say(number, *told, self._waiter(lane.rank, seconds))
                if self._in_loop and lane.rank in untold:
                    # Where Ctrl-C came in between nobody knows whether that one has this round.
                    lane.say(number + 1, *told, self._waiter(lane.rank, seconds))
            except Exception as another:  # noqa: BLE001 (the first one is raised)
                error.add_note(f"rank {lane.rank} could not be told of it: {another}")
        if far and ways.courier is not None:
            sending = self._begin_sending(ways)
            for receiver, messages in far:
                sending.post(receiver, messages)
            job = self._have_finished(ways, sending)
            # Whoever did not come until now takes this no sooner, and nobody waits for that one twice.
            if is_lost or isinstance(error, TimedOutError):
                seconds = _FAREWELL_SECONDS
            wait_for(job.wait, self._timeout.total_seconds() if seconds is None else seconds)

    def _begin_sending(self, ways: Ways) -> Sending:
        """Begin to send a round, after whatever was sent before."""
        if self._under_way is not None:
            sending, job = self._under_way
            if job is None:
                # Ctrl-C came before anybody waited for it.
                job = self._have_finished(ways, sending)
            if not job.wait(0.0):
                # It waits for somebody who is late, perhaps for ever.
                ways.renew_courier()
        sending = Sending()
        self._under_way = sending, None
        return sending

    def _have_finished(self, ways: Ways, sending: Sending) -> Job[dict[int, Exception]]:
        """Have the courier wait for what is sent."""
        courier = ways.courier or ways.renew_courier()
        job = courier.do(sending.finish)
        self._under_way = sending, job
        return job


def _described(error: BaseException) -> str:
    """An error with its traceback, cut to a bounded length in the middle of the latter."""
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except Exception:  # noqa: BLE001 (an error that cannot even be printed is still one)
        text = "(its message cannot be printed)"
    if len(text) > _LONGEST_TEXT:
        text = text[:1000] + "\n…\n" + text[-_LONGEST_TEXT:]
    return f"failed with {type(error).__name__}:\n{text}"
