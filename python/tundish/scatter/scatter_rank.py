"""The common part of a scatter's source and receivers: counts steps, waits for other ranks, and notices their loss.

Invariants:
- Every call is the next step on its rank, also after a failed one. All messages carry their step.
- A lost rank ends the scatter on all ranks, with an error that names it.
- One thread at a time calls a scatter. It may be a background thread, as no step is a collective of the job's groups.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypedDict, cast

from tundish.errors import InvalidInputError, PeerFailedError, TimedOutError
from tundish.scatter.rendezvous import connect
from tundish.scatter.transport.gloo import GlooReceiver, GlooSender
from tundish.scatter.transport.shared_memory import Waiter

if TYPE_CHECKING:
    from tundish.distributed import Voter
    from tundish.scatter.participants import Participants
    from tundish.scatter.transport.channels import Channels

__all__ = ["GONE", "MAKE_NEW", "ScatterRank", "ScatterStats"]

# Of a rank whose connection was closed, in messages.
GONE: Final = "was killed, has ended, or has left the scatter"
# The advice of errors once a scatter is closed.
MAKE_NEW: Final = "make a new group, or a new DispatchLoader, on all ranks"

# How often a rank that waits looks for ranks that are gone.
_POLL_SECONDS = 0.1
# How much longer receivers wait than the source, so that they hear which rank it waited for.
_GRACE_SECONDS = 1.0
# How long messages may be on their way after a rank of another node was killed, or after it left.
_AFTER_DEATH_SECONDS = 0.5
_AFTER_LEAVING_SECONDS = 5.0


class ScatterStats(TypedDict):
    """Counts of one scatter on this rank."""

    source: int
    """The global rank of the source."""
    ranks: list[int]
    """The global ranks of all participants."""
    transports: dict[str, list[int]]
    """By name of a transport, the ranks on the other end."""
    steps: int
    """Calls so far."""
    batches: int
    """Batches sent or received."""
    sent_bytes: int
    """Bytes of the batches sent."""
    waiting_seconds: float
    """Seconds spent waiting for other ranks."""
    memory: dict[str, int]
    """Bytes of the source's shared memory: `in_use` on their way, `cached` for the next batches, `escaped` that
    receivers hold."""


class ScatterRank:
    """One rank's part in a scatter. Collective over the members of `voter`.

    Args:
        voter: of all participants.
        participants: the ranks, and which batch each of them gets.
        timeout: how long this rank waits for another one in a step.
        in_loop: whether the steps are those of a `DispatchLoader`. An error of the source then goes to all ranks, also
            to those that have their batch of the step. A receiver waits without a timeout, because its thread runs
            ahead of the caller.
        device_backend: the kind of device and the backend for batches that go from device to device; then only the
            caller's thread may call.
    """

    def __init__(
        self,
        voter: Voter,
        participants: Participants,
        *,
        timeout: timedelta,
        in_loop: bool = False,
        device_backend: tuple[str, str] | None = None,
    ) -> None:
        self.participants = participants
        self._timeout = timeout.total_seconds()
        self._in_loop = in_loop
        self._process = os.getpid()
        self._step = 0
        self._end_error: PeerFailedError | None = None
        self._is_closed = False
        self._batches = self._sent_bytes = 0
        self._waited = 0.0
        self._channels: Channels | None = None
        if len(participants.ranks) > 1:
            self._channels = connect(
                voter,
                participants,
                timeout=timeout,
                device_backend=device_backend,
            )

    @property
    def is_source(self) -> bool:
        """Whether this rank has the data."""
        return self.participants.rank == self.participants.source

    @property
    def end_error(self) -> PeerFailedError | None:
        """The error that ended the scatter; None as long as steps may follow."""
        return self._end_error

    def skip_to(self, step: int) -> None:
        """Make `step` the next one, unless it is over. Messages of earlier steps are skipped."""
        self._step = max(self._step, step - 1)

    def end(self, why: str) -> None:
        """End the scatter because of this rank. The others notice that it leaves."""
        if self._end_error is None:
            self._end_because_of(self.participants.rank, why)
            if self._channels is not None:
                self._channels.watch.close()

    def close(self) -> None:
        """Close all channels; not collective. The others notice that this rank leaves."""
        self._is_closed = True
        if self._channels is not None:
            self._channels.close()

    def stats(self) -> ScatterStats:
        """See `tundish.scatter.stats`."""
        transports: dict[str, list[int]] = {}
        memory: Counter[str] = Counter()
        channels = self._channels
        if channels is not None:
            device = channels.device
            network = "gloo" if device is None else f"{device.backend}, from device to device"
            ends = [(sender.rank, isinstance(sender, GlooSender)) for sender in channels.senders]
            if channels.receiver is not None:
                ends.insert(0, (channels.sender_rank, isinstance(channels.receiver, GlooReceiver)))
            for rank, is_remote in ends:
                transports.setdefault(network if is_remote else "shared memory", []).append(rank)
            for sender in channels.to_node:
                memory.update(cast(Mapping[str, int], sender.stats()))
        return ScatterStats(
            source=self.participants.source,
            ranks=list(self.participants.ranks),
            transports=transports,
            steps=self._step,
            batches=self._batches,
            sent_bytes=self._sent_bytes,
            waiting_seconds=self._waited,
            memory={name: memory[name] for name in ("in_use", "cached", "escaped")},
        )

    def _begin_step(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                "this scatter was made before a fork: make one in the process that uses it"
            )
        self._raise_if_closed()
        self._step += 1

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise InvalidInputError(f"this scatter is closed: {MAKE_NEW}")

    def _raise_if_ended(self) -> None:
        """Raise where a rank on the other end of a channel is gone."""
        if self._end_error is not None:
            raise self._end_error.with_traceback(None)
        if self._channels is not None:
            # A sender may be through with all that it has for this rank.
            for rank in self._channels.watch.vanished() - {self._channels.sender_rank}:
                raise self._end_because_gone(rank)

    def _end_because_of(self, rank: int, how: str) -> PeerFailedError:
        self._end_error = PeerFailedError(f"scatter: rank {rank} {how}", rank)
        return self._end_error

    def _end_because_gone(self, rank: int) -> PeerFailedError:
        """Lose a rank that is gone, or the rank that made it leave."""
        because_of = None if self._channels is None else self._channels.watch.close_causes().get(rank)
        return self._end_because_of(rank if because_of is None else because_of, GONE)

    def _waiter(self, rank: int, seconds: float | None = None) -> Waiter:
        return lambda is_ready: self._wait(is_ready, rank, seconds=seconds)

    def _wait(
        self,
        is_ready: Callable[[float], bool],
        rank: int | Callable[[], int | None],
        *,
        seconds: float | None = None,
    ) -> None:
        """Wait for another rank.

        Args:
            is_ready: waits for so many seconds, and returns whether the event came.
            rank: the rank, or a function that returns it once it is known.
            seconds: for how long, in place of the scatter's timeout.
        """
        if is_ready(0.0):
            return
        begin = time.monotonic()
        seconds = self._timeout if seconds is None else seconds
        is_endless = self._in_loop and not self.is_source
        deadline = begin + seconds + (0.0 if self.is_source else _GRACE_SECONDS)
        try:
            while not is_ready(_POLL_SECONDS):
                self._raise_if_closed()
                name = rank() if callable(rank) else rank
                if self._channels is not None and name in self._channels.watch.vanished():
                    if is_ready(self._seconds_after(name)):
                        return
                    raise self._end_because_gone(name)
                if time.monotonic() > deadline and not is_endless:
                    raise TimedOutError(
                        f"scatter: {'another rank' if name is None else f'rank {name}'} did not come within "
                        f"{seconds:.4g} s. It hangs, was stopped, or is elsewhere in the program: look at its stack, "
                        "or give the process group a longer timeout"
                    )
        finally:
            self._waited += time.monotonic() - begin

    def _seconds_after(self, rank: int) -> float:
        """For how many seconds a message may still come of a rank that is gone."""
        channels = self._channels
        if (
            channels is None
            or rank != channels.sender_rank
            or not isinstance(channels.receiver, GlooReceiver)
        ):
            return 0.0
        return _AFTER_LEAVING_SECONDS if rank in channels.watch.close_causes() else _AFTER_DEATH_SECONDS
